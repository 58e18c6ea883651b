"""The HTTP mechanics of the gateway: access checks, budgets, answers, errors, streams, access log and metrics.

Must not import routes or services.
"""
