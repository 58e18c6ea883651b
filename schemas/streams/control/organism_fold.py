"""The fold of the stream `control/organism`: the current listeners of the XML pump (XP-09, XP-11).

Entries:
`listener/<name>`: one listener.
`loaded`: the digest of the file that was loaded last.
`nonces`: the commands of the last 15 minutes, so that none is accepted twice.
`version`: the number of accepted commands, 8 bytes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.memories import content_digest
from schemas.fold.settled import Change, Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput
from schemas.streams.control.organism import (
    LISTENER_ADDED,
    LISTENER_REMOVED,
    NONCES_KEPT_S,
    Listener,
    ListenerRow,
)
from schemas.streams.principal.principals import ACTIVE
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
REMOVED: Final = "removed"
_LOADED: Final = "loaded"
# The values of the fields that the body of a listener may omit.
_DEFAULTS: Final = {name: one.default for name, one in Listener.model_fields.items() if not one.is_required()}
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


_LISTENERS: Final = StructEntries("listener/", _ListenerEntry)
_NONCES: Final = StructEntries("nonces", _Nonces)


def settle_organism(given: FoldInput) -> Outcome:
    """Settle a record of `control/organism`: update the stream state, return verdict and changed rows.

    The record adds or removes a listener, or replaces all. `settle_control` has checked its body. The changes
    of the stream state, `given.entries`, count only if the record is accepted.
    """
    now, body, entries = given.now_us, given.body, given.entries
    digest = content_digest(body)
    nonces = _NONCES.read(entries) or _Nonces(ENTRY_VERSION, {})
    oldest = now - NONCES_KEPT_S * 1_000_000
    newest = {nonce: known for nonce, known in nonces.known.items() if known[1] > oldest}
    known = newest.get(body["request_id"])
    if known is not None:
        if known[0] == digest:
            return duplicate(None)
        return rejected(SEQ_CONFLICT, "this request id was used with other content")
    if given.type == LISTENER_ADDED:
        if _LISTENERS.read(entries, body["listener"]["name"]) is not None:
            return rejected(ILLEGAL_TRANSITION, "there is a listener of this name")
        changes = [_put(body["listener"], now, entries)]
    elif given.type == LISTENER_REMOVED:
        listener = _LISTENERS.read(entries, body["name"])
        if listener is None:
            return rejected(UNKNOWN_STREAM, "there is no listener of this name")
        changes = [_remove(listener, now, entries)]
    else:
        names = [listener["name"] for listener in body["listeners"]]
        if len(set(names)) < len(names):
            return rejected(ILLEGAL_TRANSITION, "a listener's name twice")
        changes = _load(body, now, entries)
    nonces.known = {**newest, body["request_id"]: (digest, now)}
    _NONCES.write(entries, nonces)
    entries.put(_VERSION, (organism_version(entries) + 1).to_bytes(8, "big"))
    return accepted(None, tuple(changes))


def loaded_digest(entries: Entries) -> str | None:
    """Return the SHA-256 in hex of the organism file that was loaded last, or `None` if none was loaded.

    The gateway compares it with that of `conf/organism.yaml`, to load the file only if it has changed.
    `entries` is the state of the stream `control/organism`.
    """
    raw = entries.get(_LOADED)
    return None if raw is None else raw.decode("ascii")


def organism_version(entries: Entries) -> int:
    """Return the version of the organism: the number of accepted records that changed or loaded its listeners.

    A load of an unchanged file counts, too. The result is 0 if there is no such record. `entries` is the state
    of the stream `control/organism`.
    """
    raw = entries.get(_VERSION)
    return 0 if raw is None else int.from_bytes(raw, "big")


def _load(body: dict[str, Any], now: int, entries: Entries) -> list[Change]:
    """Replace the listeners. An unchanged listener is not written again."""
    wanted = {listener["name"]: listener for listener in body["listeners"]}
    names = [key.removeprefix(_LISTENERS.key) for key in entries.with_prefix(_LISTENERS.key)]
    known = {name: entry for name in names if (entry := _LISTENERS.read(entries, name)) is not None}
    changes = [_remove(entry, now, entries) for name, entry in known.items() if name not in wanted]
    for name, listener in wanted.items():
        if name not in known or known[name].body != listener:
            changes.append(_put(listener, now, entries))
    entries.put(_LOADED, body["digest"].encode("ascii"))
    return changes


def _put(listener: dict[str, Any], now: int, entries: Entries) -> Change:
    _LISTENERS.write(entries, _ListenerEntry(ENTRY_VERSION, listener, now), listener["name"])
    return _change(listener, now, None)


def _remove(entry: _ListenerEntry, now: int, entries: Entries) -> Change:
    entries.delete(_LISTENERS.key + entry.body["name"])
    return _change(entry.body, entry.added_at, now)


def _change(listener: dict[str, Any], added_at: int, removed_at: int | None) -> Change:
    fields = {**_DEFAULTS, **listener}
    name = fields.pop("name")
    status = ACTIVE if removed_at is None else REMOVED
    return changed(
        ListenerRow(listener=name, status=status, added_at=added_at, removed_at=removed_at, **fields)
    )
