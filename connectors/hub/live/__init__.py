"""The live view: the fold in memory over the log, with rows, feeds of settled records, and waits.

Imports `log`, `ledger_files` and `retry`, but nothing that serves clients.
"""
