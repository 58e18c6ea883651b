"""Malformed bodies by CM-02 and the wire model, one of each kind."""

from __future__ import annotations

from typing import Any, NamedTuple

from schemas.wire.masking import WHOLE_VALUE
from schemas.wire.strict_json import MAX_DEPTH, canonical

_DEEP = 5000


class MalformedBody(NamedTuple):
    """One body. `masked` is the part that the ledger must mask; an escape masks the whole body."""

    label: str
    payload: bytes
    masked: str | None = None


def malformed_bodies(good: dict[str, Any]) -> list[MalformedBody]:
    """Return one body of each kind, made from `good`, a well-formed event that is not signed."""
    text = canonical(good)
    return [
        MalformedBody("an empty body", b""),
        MalformedBody("cut off in the middle", text[: len(text) // 2]),
        MalformedBody("no JSON at all", b"done!"),
        MalformedBody("a list, not an object", b"[" + text + b"]"),
        MalformedBody("a key twice", b'{"seq":1,' + text[1:]),
        MalformedBody("NaN", _with(text, b"NaN")),
        MalformedBody("a number beyond the largest float", _with(text, b"1e999")),
        MalformedBody("an integer beyond 64 bits", _with(text, b"9223372036854775808")),
        MalformedBody("a lone surrogate", _with(text, b'"\\ud800"'), WHOLE_VALUE),
        MalformedBody("invalid UTF-8", _with(text, b'"\xff\xfe"')),
        MalformedBody("nested one level too deep", _with(text, _nested(MAX_DEPTH))),
        MalformedBody("nested 5,000 deep", _with(text, _nested(_DEEP))),
        MalformedBody("the id of another job", canonical({**good, "job_id": "ffffffff"})),
        MalformedBody("seq 0", canonical({**good, "seq": 0})),
        MalformedBody("an unknown event", canonical({**good, "event": "finished"})),
        MalformedBody("a local time", canonical({**good, "timestamp": "2026-11-21T10:00:00+01:00"})),
        MalformedBody("a line break in the detail", canonical({**good, "detail": "one\ntwo"})),
        MalformedBody("a detail of 501 characters", canonical({**good, "detail": "x" * 501})),
    ]


def _with(text: bytes, value: bytes) -> bytes:
    return text[:-1] + b',"odd":' + value + b"}"


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth
