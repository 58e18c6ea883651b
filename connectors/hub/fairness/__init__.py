"""Fairness among principals that use the gateway at once. It imports only `plumbing.network` of ours."""
