"""The out-of-band command door (XP-11): signed commands over a Unix socket that change the XML listeners.

It uses the gateway's services and must not import the pump or the command line.
"""
