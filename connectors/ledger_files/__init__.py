"""Reading and exporting the ledger without Spark."""
