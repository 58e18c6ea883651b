"""The documents of the API, made from the models: JSON Schemas, an AsyncAPI document, and the page `/docs`.

`.ci/reference_pages.py --contracts DIR` writes the same documents. Imports no route package.
"""
