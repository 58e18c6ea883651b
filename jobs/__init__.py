"""The Spark jobs: programs that settle the log into the ledger and build the views.

Only these programs write Delta tables. They import `schemas`, but nothing of `connectors`.
"""
