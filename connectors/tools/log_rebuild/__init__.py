"""`trunkline log rebuild`: makes the Kafka topic again from the ledger.

Imports `log`, but nothing else of `connectors`.
"""
