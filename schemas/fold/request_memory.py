"""Which requests a stream has settled: the digests of the newest 256, so that a repeated one is known."""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

from schemas.wire.strict_json import canonical

REQUESTS_KEPT: Final = 256
_DIGEST_BYTES: Final = 16


class RequestMemory(msgspec.Struct, array_like=True, gc=False):
    """CloudEvents id (hashed) to content digest, oldest first. A request older than 256 others is new again."""

    digests: dict[bytes, bytes] = {}

    def seen(self, ce_id: str, body: dict[str, Any]) -> Literal["new", "same", "other"]:
        """Whether this id was settled, with this content or with another."""
        known = self.digests.get(_digest(ce_id.encode("utf-8")))
        if known is None:
            return "new"
        return "same" if known == content_digest(body) else "other"

    def add(self, ce_id: str, body: dict[str, Any]) -> None:
        """Note a request that `seen` called new."""
        self.digests[_digest(ce_id.encode("utf-8"))] = content_digest(body)
        if len(self.digests) > REQUESTS_KEPT:
            del self.digests[next(iter(self.digests))]


def content_digest(body: dict[str, Any]) -> bytes:
    """16 bytes that tell the content of a body."""
    return _digest(canonical(body))


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()[:_DIGEST_BYTES]
