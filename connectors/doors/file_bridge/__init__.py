"""The bridge between the file queue and the mailboxes, in both directions (FQ-15 to FQ-17).

Must not import the gateway: the bridge reaches it through its HTTP API, and writes the log itself.
"""
