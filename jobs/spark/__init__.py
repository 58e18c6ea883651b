"""Memory and packing of records in Spark's Python workers.

Imports nothing else of the jobs.
"""
