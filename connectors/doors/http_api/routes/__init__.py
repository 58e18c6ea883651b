"""The routes of the HTTP door that are no operation: the document of the API, streams and uploads."""
