"""The services that the gateway runs over the live view, and `Hub`, which creates and holds them.

Must not import routes.
"""
