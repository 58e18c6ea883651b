"""A Unix socket that one process has at a time."""
