"""The view tables: their changes, their one writer with its index of keys, and its lock.

Imports nothing else of the jobs.
"""
