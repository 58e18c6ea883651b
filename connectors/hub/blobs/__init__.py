"""Large bodies by reference (DL-25, DL-26): blobs are uploaded, fetched and removed.

`blob_store` has the bytes, `blob_references` the messages that refer to them, and `blob_keeper` removes them.
Must not import other packages of the gateway; the routes are in `connectors.operations.messages`.
"""
