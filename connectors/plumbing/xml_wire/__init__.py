"""XML of unknown senders: safe parsing, repair, limits, the envelope and its faults.

It must not import the packages of listeners, payload classes or the pump.
"""
