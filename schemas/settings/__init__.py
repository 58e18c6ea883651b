"""The settings of all programs: their fields, defaults, bounds and sources.

Imports only `schemas.errors` and `schemas.wire`.
"""
