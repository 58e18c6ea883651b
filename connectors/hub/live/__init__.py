"""The live view: the fold in memory over the log, with rows, feeds of settled records, and waits.

Of the hub it imports nothing else.
"""
