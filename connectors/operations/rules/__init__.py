"""Rules and bodies that several route modules share: owners, recipients, names, limits and the hub's policy.

Must not import route modules.
"""
