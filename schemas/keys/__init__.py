"""Keyrings, sealed secrets, keys in PEM, and files that only their owner may read."""
