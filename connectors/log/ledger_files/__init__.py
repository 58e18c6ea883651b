"""Reading, exporting and replaying the ledger's rows without Spark."""
