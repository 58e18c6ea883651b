"""The files of web pages, and the documents, that the gateway serves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from fastapi import Request, Response

MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class PageFile(NamedTuple):
    """One file of a web page: its bytes, its media type, and its ETag (a hash of the bytes)."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, content: bytes, suffix: str) -> PageFile:
        """Return the file with this content. `suffix` is the end of its name, a key of `MEDIA_TYPES`."""
        return cls(content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')

    def answer(self, request: Request, more_headers: Mapping[str, str] = _NONE) -> Response:
        """Return the HTTP response with the file, or status 304 if the browser's copy has the same ETag."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache", **more_headers}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)
