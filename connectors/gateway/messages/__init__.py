"""HTTP routes for messages, mailboxes and principals.

Must not import other route packages.
"""
