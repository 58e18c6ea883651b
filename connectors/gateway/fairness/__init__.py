"""Fairness among the principals that use the gateway at once. Of ours it imports only `connectors.rates`."""
