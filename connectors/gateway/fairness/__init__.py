"""Fairness among the principals that use the gateway at once. It imports no other package of ours."""
