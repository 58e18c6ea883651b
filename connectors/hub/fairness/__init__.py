"""Fairness among the principals that use the gateway at once: turns, shares of budgets, and pauses."""
