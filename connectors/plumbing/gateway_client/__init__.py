"""A client of the gateway over HTTP: requests, TLS, the operator's token, events, copies of registries.

It must not import the gateway.
"""
