"""The files that declare agents and listeners: the organism file, its handlers, and agent definitions.

Must not import the gateway or the XML pump, which runs handlers in a process of its own.
"""
