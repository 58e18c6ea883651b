"""Conditional and partial answers for a content that never changes (RFC 9110, sections 13 and 14)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from connectors.hub.serving.answers import ApiError

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
