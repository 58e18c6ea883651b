"""Large bodies by reference (DL-25, DL-26): blobs are uploaded, fetched and removed.

`blob_store` has the bytes, and `blob_keeper` the messages that refer to them; it removes them.
The routes are in `connectors.doors.http_api.routes`.
"""
