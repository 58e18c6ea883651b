"""The contracts as documents, made from the models: JSON Schemas, an AsyncAPI document, and their HTTP routes.

`.ci/reference_pages.py --contracts DIR` writes the same documents. Imports no route package.
"""
