"""Reading, exporting and replaying the ledger's rows without Spark.

Imports `log`, `retry` and `terminal`, but neither the command line nor the gateway.
"""
