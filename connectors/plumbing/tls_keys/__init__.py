"""The local certificate authority, the TLS files that it makes, and changes to the file of the master keys.

Must not import the stack, the gateway or the command line.
"""
