"""Checks the ledger against its audit chain, and the chain against its anchors, as an auditor does."""
