"""XML that strangers send: safe parsing, repair, limits, the envelope and its faults.

Knows no listener and no pump.
"""
