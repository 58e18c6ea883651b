"""Rules and bodies that several families share: owners, recipients, names, limits and the hub's policy.

It imports no family.
"""
