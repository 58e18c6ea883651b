"""The settling query's stateful operator, its state, its sink and its checkpoint.

Imports `ledger`, `spark` and `views`, but no job.
"""
