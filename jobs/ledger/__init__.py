"""The table `ledger`: its data files, its commits' audit chain, and its checkpoints.

Imports `driver` and `views`, but no job.
"""
