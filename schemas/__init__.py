"""The contract that every part shares: records, the fold, rows, tables, settings and keys.

Imports nothing of `connectors` or `jobs`.
"""
