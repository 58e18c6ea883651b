"""Keyrings, sealed secrets, the MACs of records, and the umask of programs."""
