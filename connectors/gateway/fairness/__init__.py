"""Fairness among the principals that use the gateway at once. Must not import the gateway's other packages."""
