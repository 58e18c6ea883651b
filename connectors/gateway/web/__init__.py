"""HTTP mechanics of the gateway: admission, budgets, answers, errors, access log and metrics.

Knows no route and no service.
"""
