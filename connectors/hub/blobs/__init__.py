"""Large bodies by reference (DL-25, DL-26): blobs are uploaded, fetched and removed.

`blob_store` has the bytes, `blob_references` the messages that refer to them, and `blob_keeper` removes them.
The routes are in `connectors.doors.http_api.routes`.
"""
