"""The view tables: their changes, and their one writer with its index of keys.

Imports nothing else of the jobs.
"""
