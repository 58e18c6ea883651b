"""The fold of `control/organism` (XP-09, XP-11): the current listeners of the XML pump.

Entries:
`listener/<name>`: one listener.
`loaded`: the digest of the file that was loaded last.
`nonces`: the commands of the last 15 minutes, so that none is accepted twice.
`version`: the number of accepted commands, 8 bytes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold.entries import Entries
from schemas.fold.memories import content_digest
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.stream_kind import FoldInput
from schemas.streams.control.organism import (
    CONCURRENCY,
    LISTENER_ADDED,
    LISTENER_REMOVED,
    NONCES_KEPT_S,
    REGISTRY_LISTENERS,
    TIMEOUT_MS,
    ListenerRow,
)
from schemas.streams.principal.principals import ACTIVE
from schemas.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
REMOVED: Final = "removed"
_LISTENER: Final = "listener/"
_LOADED: Final = "loaded"
_NONCES: Final = "nonces"
_VERSION: Final = "version"


class _ListenerEntry(msgspec.Struct, array_like=True, gc=False):
    """A listener. `body` is the listener as its record declared it."""

    version: int
    body: dict[str, Any]
    added_at: int


class _Nonces(msgspec.Struct, array_like=True, gc=False):
    """Each request id with its content digest and its record's time (microseconds since 1970 UTC)."""

    version: int
    known: dict[str, tuple[bytes, int]]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_listener: Final = msgspec.msgpack.Decoder(_ListenerEntry).decode
_decode_nonces: Final = msgspec.msgpack.Decoder(_Nonces).decode


def settle_organism(given: FoldInput) -> Outcome:
    """Return the outcome of one record of the organism. Its body must have passed its model."""
    now, body, entries = given.now_us, given.body, given.entries
    digest = content_digest(body)
    raw = entries.get(_NONCES)
    nonces = _Nonces(ENTRY_VERSION, {}) if raw is None else _decode_nonces(raw)
    oldest = now - NONCES_KEPT_S * 1_000_000
    nonces.known = {nonce: known for nonce, known in nonces.known.items() if known[1] > oldest}
    known = nonces.known.get(body["request_id"])
    if known is not None:
        if known[0] == digest:
            return duplicate(None)
        return rejected(SEQ_CONFLICT, "this request id was used with other content")
    if given.type == LISTENER_ADDED:
        name = body["listener"]["name"]
        if entries.get(_LISTENER + name) is not None:
            return rejected(ILLEGAL_TRANSITION, "there is a listener of this name")
        changes = [_put(body["listener"], now, entries)]
    elif given.type == LISTENER_REMOVED:
        if entries.get(_LISTENER + body["name"]) is None:
            return rejected(UNKNOWN_STREAM, "there is no listener of this name")
        changes = [_remove(body["name"], now, entries)]
    else:
        names = [listener["name"] for listener in body["listeners"]]
        if len(set(names)) < len(names):
            return rejected(ILLEGAL_TRANSITION, "a listener's name twice")
        changes = _load(body, now, entries)
    nonces.known[body["request_id"]] = (digest, now)
    entries.put(_NONCES, _encode(nonces))
    entries.put(_VERSION, (organism_version(entries) + 1).to_bytes(8, "big"))
    return accepted(None, tuple(changes))


def loaded_digest(entries: Entries) -> str | None:
    """Return the digest of the file that was loaded last, or `None` if no file was loaded."""
    raw = entries.get(_LOADED)
    return None if raw is None else raw.decode("ascii")


def organism_version(entries: Entries) -> int:
    """Return the number of accepted commands, including those that changed no listener, such as a reload."""
    raw = entries.get(_VERSION)
    return 0 if raw is None else int.from_bytes(raw, "big")


def _load(body: dict[str, Any], now: int, entries: Entries) -> list[Change]:
    """Replace the listeners. An unchanged listener is not written again."""
    wanted = {listener["name"]: listener for listener in body["listeners"]}
    there = [key.removeprefix(_LISTENER) for key in entries.with_prefix(_LISTENER)]
    changes = [_remove(name, now, entries) for name in there if name not in wanted]
    for name, listener in wanted.items():
        raw = entries.get(_LISTENER + name)
        if raw is None or _decode_listener(raw).body != listener:
            changes.append(_put(listener, now, entries))
    entries.put(_LOADED, body["digest"].encode("ascii"))
    return changes


def _put(listener: dict[str, Any], now: int, entries: Entries) -> Change:
    entries.put(_LISTENER + listener["name"], _encode(_ListenerEntry(ENTRY_VERSION, listener, now)))
    return _change(listener, now, None)


def _remove(name: str, now: int, entries: Entries) -> Change:
    raw = entries.get(_LISTENER + name)
    if raw is None:
        raise KeyError(name)
    entry = _decode_listener(raw)
    entries.delete(_LISTENER + name)
    return _change(entry.body, entry.added_at, now)


def _change(listener: dict[str, Any], added_at: int, removed_at: int | None) -> Change:
    row = ListenerRow(
        listener=listener["name"],
        status=ACTIVE if removed_at is None else REMOVED,
        type=listener.get("type", "handler"),
        capability=listener.get("capability", ""),
        root_tag=listener["root_tag"],
        namespace=listener.get("namespace", ""),
        handler=listener.get("handler"),
        xsd=listener.get("xsd"),
        example=listener.get("example"),
        visible_tools=listener.get("visible_tools"),
        concurrency=listener.get("concurrency", CONCURRENCY),
        per_minute=listener.get("per_minute"),
        tokens_per_minute=listener.get("tokens_per_minute"),
        timeout_ms=listener.get("timeout_ms", TIMEOUT_MS),
        options=listener.get("options"),
        added_at=added_at,
        removed_at=removed_at,
    )
    return Change(REGISTRY_LISTENERS, row.listener, row)
