"""The Spark jobs: programs that settle the log into the ledger and build the views.

Only here Delta tables are written.
"""
