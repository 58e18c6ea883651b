"""`trunkline log rebuild`: makes the Kafka topic again from the ledger."""
