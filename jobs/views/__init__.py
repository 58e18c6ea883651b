"""The view tables: their changes, their one writer and its lock, and the buckets of the state.

Imports nothing else of the jobs.
"""
