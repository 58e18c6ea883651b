"""A Unix socket that one process at a time listens on.

Must not import anything else of `connectors`.
"""
