"""Keyrings, sealed secrets, and files that only their owner may read."""
