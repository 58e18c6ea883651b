"""Services that the gateway keeps over the live view, and `Hub`, which holds them all.

Must not import routes.
"""
