"""The audit: checks the ledger against its audit chain, and the chain against its signed anchors.

Imports nothing else of `connectors`.
"""
