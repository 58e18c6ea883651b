"""The blobs that messages refer to."""
