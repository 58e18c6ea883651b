"""The state of all streams of a Kafka partition in a local file, as of an offset of the log.

A store is a cache of the ledger. It may be deleted at any time, and is then built again from the tables.
"""
