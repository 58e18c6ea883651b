"""Ids derived from content, by which a repeated message is recognized and a receipt is matched."""

from __future__ import annotations

import hashlib


def content_id(*parts: bytes) -> str:
    """Return an id derived from content: the SHA-256 of all parts in hex. Equal parts give the same id.

    Each part is preceded by its length as eight bytes, so that the same bytes divided otherwise give another
    id.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
