"""The local certificate authority, TLS files and master keys."""
