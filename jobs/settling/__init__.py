"""The settling query: its tasks, their local stores, its sink and the checks before a start.

Imports `ledger`, but no job.
"""
