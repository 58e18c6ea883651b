"""Contents that the gateway serves: files of web pages, and conditional and partial answers.

Conditions and ranges are those of RFC 9110, sections 13 and 14, for a content that never changes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from fastapi import Request, Response

from connectors.hub.serving.answers import ApiError

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
        if is_unchanged(request.headers, self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


# One range. Several in one request are ignored, which section 14.2 allows: the answer is the whole content.
_ONE_RANGE: Final = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)


class ByteRange(NamedTuple):
    """A part of a content: from byte `start` up to, but without, byte `end`."""

    start: int
    end: int


def is_unchanged(headers: Mapping[str, str], etag: str) -> bool:
    """Return whether the client has the content with this strong ETag already, by its If-None-Match."""
    known = [one.strip().removeprefix("W/") for one in headers.get("if-none-match", "").split(",")]
    return etag in known or known == ["*"]


def range_of(headers: Mapping[str, str], etag: str, size: int) -> ByteRange | None:
    """Return the part of a content that a request asks for, or None for all of it.

    Args:
        headers: The headers of the request, by their names in lower case.
        etag: The strong ETag of the content. With another one in If-Range the answer is the whole content.
        size: The length of the content in bytes.

    Raises:
        ApiError: 416, if the content has no byte of the range.
    """
    found = _ONE_RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", etag) != etag:
        return None
    first, last = found.groups()
    if first:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    elif last:
        start, end = max(0, size - int(last)), size
    else:
        return None
    if start >= end:
        raise ApiError(
            416,
            "range_not_satisfiable",
            f"the content has {size} bytes, and none in the range {found[0]}",
            {"Content-Range": f"bytes */{size}"},
        )
    return ByteRange(start, end)
