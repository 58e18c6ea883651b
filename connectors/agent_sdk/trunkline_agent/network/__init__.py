"""The way to a server: its proxy by the environment, and its addresses one after the other.

Needs Python's standard library alone. Must not import the rest of the library but its errors.
"""
