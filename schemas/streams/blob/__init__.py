"""The blob stream: a large body that is stored outside the log, by the digest of its content."""
