"""The settings of all programs: their fields, defaults, bounds and sources.

Imports only `trunkline_agent.errors` and `schemas.wire`.
"""
