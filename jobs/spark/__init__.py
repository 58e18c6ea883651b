"""Packing of records in Spark's Python workers, and their memory.

Imports nothing else of the jobs.
"""
