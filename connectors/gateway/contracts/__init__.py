"""The contracts as documents, made from the models: JSON Schemas, an AsyncAPI document, and their HTTP routes.

`.ci/reference_pages.py` writes the same documents below docs/reference/contracts. Imports no route package.
"""
