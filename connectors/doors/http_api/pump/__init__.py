"""HTTP routes for pumps and XML messages.

Must not import other route packages, except for path parameters.
"""
