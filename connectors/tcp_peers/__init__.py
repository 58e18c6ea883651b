"""Probes of the peers of TCP connections.

Must not import anything else of `connectors`.
"""
