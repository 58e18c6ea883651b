"""Writing the ledger table, its files, its audit chain and its checkpoints."""
