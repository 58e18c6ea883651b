"""Keyrings, sealed secrets and the MACs of records."""
