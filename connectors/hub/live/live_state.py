"""The state of the live view: what is live in memory, everything in a local store, and the fold over both.

This module starts no thread and does not use Kafka. The caller applies records one by one, in the order of each
partition, and writes the changes to the store from time to time (`StoreWriter`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import islice
from typing import Final

import msgspec

from connectors.hub.live.live_changes import OVERHEAD_BYTES, Recent, Unflushed, entry_size, row_size
from connectors.hub.live.settled_feed import SettledRecord
from schemas.fold.entries import Entries, Writes
from schemas.fold.settled import AppliedChange, Change, Settled
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring
from schemas.state_store.ended_lists import WHOLE, Span, is_listed
from schemas.state_store.gateway_store import GatewayStore, LogPlace, PlacedRow
from schemas.state_store.local_store import StoreDamaged
from schemas.streams.control.record_macs import macs_stream
from schemas.streams.fold import VIEWS, settle
from schemas.wire.record import Position, Record
from trunkline_agent.wire.ids import parse_stream_key

_NEVER: Final = -1
_NO_WRITES: Final[Writes] = {}
# Keys that are read at once.
_KEYS_MOST: Final = 1024
# Ranges of the store with fewer keys than this are kept, and so many of them.
_FEW_KEYS: Final = 16
_RANGES: Final = 10_000
# In the cache, instead of the bytes of an entry that does not exist. No entry is empty.
_MISSING: Final = b""
# The views with rows that end, which the store has.
_WITH_ENDED: Final = frozenset(name for name, view in VIEWS.items() if view.is_live is not Row.is_live)
_digest_encode: Final = msgspec.msgpack.Encoder().encode


def digest_of(record: Record) -> str:
    """Return a digest of a record's key, headers, value and append time."""
    parts = (record.logged_at_us, record.key, record.value, record.header_names, record.header_values)
    return hashlib.sha256(_digest_encode(parts)).hexdigest()


class LiveState:
    """The result of the fold so far: each stream's state (its entries), and the rows of all views.

    One thread calls `apply`, one calls `take` and `flushed`. Any thread may read.

    Args:
        keyring: The master keys.
        store: A store that has a place in the log. Its live rows are loaded.
    """

    def __init__(self, keyring: Keyring, store: GatewayStore) -> None:
        self._keyring = keyring
        self._store = store
        self.place = _place_of(store)
        self._ahead = dict(self.place.ahead)
        # Held while a record changes entries and rows, so that nobody copies half of a change. The fold, which
        # runs meanwhile, asks for keys.
        self._lock = threading.RLock()
        self._unflushed = Unflushed()
        self._flushing: Unflushed | None = None
        # Rows that have ended, and entries: what was read from the store and has not changed since.
        self._recent = Recent(row_size)
        self._recent_entries = Recent(entry_size)
        # By stream, prefix and first key: all keys of a range of the store, if it has few.
        self._few_keys: dict[tuple[str, str, str], list[str]] = {}
        self._takes = 0
        # Whether records need a MAC is asked for each record, so this is decoded once, by partition.
        self._macs: dict[int, Entries] = {}
        self._live: dict[str, dict[str, PlacedRow]] = {name: dict(store.live_rows(name)) for name in VIEWS}

    def apply(self, record: Record, on_change: Callable[[AppliedChange], None]) -> SettledRecord | None:
        """Settle `record`: run the fold, update entries and rows, and return the record with its verdict.

        Args:
            record: The next record of its partition.
            on_change: Called for each row that the record adds, changes or removes.

        Returns:
            The settled record. None if the state that was loaded from the tables includes the record, so that
            nothing changes.

        Raises:
            MissingKeyError: The record's MAC is under a master key that this process lacks.
            StoreDamaged: The store must be discarded.
        """
        stream = None
        if record.key is not None and parse_stream_key(record.key) is not None:
            stream = record.key.decode("ascii")
        with self._lock:
            if stream is not None and record.offset <= self._ahead.get(stream, _NEVER):
                self._count(record, 0)
                if record.offset == self._ahead[stream]:
                    del self._ahead[stream]
                return None
            macs = self._macs.get(record.partition)
            if macs is None:
                of_macs = _LiveEntries(self, macs_stream(record.partition), is_kept=True)
                macs = self._macs[record.partition] = Entries(source=of_macs)
            is_of_macs = stream is not None and stream == macs_stream(record.partition)
            entries = macs if is_of_macs else self._entries_to_apply(stream)
            settled = settle(record, entries, self._keyring, macs)
            writes = entries.take_writes()
            if writes and stream is not None:
                self._unflushed.write(stream, writes)
            changes = [found for one in settled.changes if (found := self._change(record, one)) is not None]
            self._count(record, OVERHEAD_BYTES * (len(writes) + len(changes)))
        for change in changes:
            on_change(change)
        return _shown(record, settled)

    def _change(self, record: Record, change: Change) -> AppliedChange | None:
        view, key = change.view, change.key
        # A loaded table of rows may be ahead of the table of entries. Then the row in it is newer.
        if record.offset <= self.place.rows_until.get(record.partition, _NEVER):
            known = self._in_memory(view, key) or self._store.ended(view, key)
            if known is not None and record.offset < known[0]:
                return None
        placed = (record.offset, change.row)
        # A reader looks among the live rows first, so a row is always in one of the two.
        if change.row is None or change.row.is_live:
            self._live[view][key] = placed
            self._unflushed.rows[view][key] = placed
        else:
            self._unflushed.rows[view][key] = placed
            self._live[view].pop(key, None)
        return AppliedChange(view, key, record.offset, change.row)

    def _count(self, record: Record, overhead: int) -> None:
        self._unflushed.last[record.partition] = record
        self._unflushed.records += 1
        if overhead:
            self._unflushed.size += overhead + len(record.value or b"")

    def entries(self, stream: str) -> Entries:
        """Return the state of `stream` (see `LiveRows.entries`). Each read of it may raise StoreDamaged."""
        return Entries(source=_LiveEntries(self, stream, is_kept=False))

    def _entries_to_apply(self, stream: str | None) -> Entries:
        return Entries() if stream is None else Entries(source=_LiveEntries(self, stream, is_kept=True))

    def entry(self, stream: str, key: str, *, is_kept: bool = False) -> bytes | None:
        """Return the bytes of one entry, or None. Raises StoreDamaged.

        `is_kept` says whether what is read from the store is cached. Only the thread that applies may do so.
        """
        # In this order, so that a change which the store gets meanwhile is not missed.
        writes = self._unflushed.entries.get(stream)
        if writes is not None and key in writes:
            return writes[key]
        flushing = self._flushing
        if flushing is not None and key in (writes := flushing.entries.get(stream, _NO_WRITES)):
            return writes[key]
        found = self._recent_entries.get((stream, key))
        if found is None:
            found = self._store.entry(stream, key) or _MISSING
            if is_kept:
                self._recent_entries.put((stream, key), found)
        return found or None

    def entry_keys(self, stream: str, prefix: str, after: str, most: int) -> list[str]:
        """Return keys of entries in order (see `EntrySource.keys`). Raises StoreDamaged."""
        with self._lock:
            hidden: list[Writes] = []
            layers: list[Iterator[str]] = []
            for unwritten in (self._unflushed, self._flushing):
                if unwritten is not None and stream in unwritten.entries:
                    # A copy: a layer is read later, and its own changes do not hide it.
                    layers.append(_visible(partial(unwritten.keys, stream, prefix), after, most, hidden[:]))
                    hidden.append(unwritten.entries[stream])
            layers.append(_visible(partial(self._stored_keys, stream, prefix), after, most, hidden))
            return list(islice(merge(*layers), most))

    def _stored_keys(self, stream: str, prefix: str, after: str, most: int) -> list[str]:
        """Return keys of the store. If they are few, they are kept until the store is written."""
        place = (stream, prefix, after)
        found = self._few_keys.get(place)
        if found is None:
            found = self._store.entry_keys(stream, prefix, after, most)
            if len(found) < min(most, _FEW_KEYS):
                if len(self._few_keys) >= _RANGES:
                    self._few_keys.clear()
                self._few_keys[place] = found
        return found[:most]

    def find(self, view: str, key: str) -> PlacedRow | None:
        """Return a row and the offset of the record that last changed it, or None. Raises StoreDamaged."""
        return self._in_memory(view, key) or self._read(view, key)

    def _in_memory(self, view: str, key: str) -> PlacedRow | None:
        found = self._live[view].get(key) or self._unflushed.rows[view].get(key)
        if found is None and (flushing := self._flushing) is not None:
            found = flushing.rows[view].get(key)
        return found or self._recent.get((view, key))

    def _read(self, view: str, key: str) -> PlacedRow | None:
        if view not in _WITH_ENDED:
            return None
        takes = self._takes
        found = self._store.ended(view, key)
        if found is not None:
            with self._lock:
                # Otherwise the row may have changed and be in the store again since it was read.
                if takes == self._takes:
                    self._recent.put((view, key), found)
        return found

    def live(self, view: str) -> list[Row]:
        """Return the rows of a view that are live, in no order. They are in memory."""
        return [row for _, row in list(self._live[view].values()) if row is not None]

    def rows(self, view: str) -> Iterator[Row]:
        """Yield all rows of a view: live ones from memory, ended ones from the store. Raises StoreDamaged."""
        # The store is read after this, so a row that is written to it meanwhile is not missed.
        newer = self._unwritten(view)
        newer |= dict(self._live[view])
        yield from (row for _, row in newer.values() if row is not None)
        for key, (_, row) in self._store.ended_rows(view):
            if row is not None and key not in newer:
                yield row

    def newest_ended(self, view: str, listed: str, span: Span) -> Iterator[Row]:
        """Yield the ended rows in a part of a list, the newest first. Raises StoreDamaged.

        Args:
            view: The name of the view.
            listed: The name of the list, one of `Row.lists`.
            span: The part of the list.
        """
        order, newer = VIEWS[view].ORDER, self._unwritten(view)
        listing = [row for _, row in newer.values() if row is not None and is_listed(row, listed, span)]
        ours = sorted(((getattr(row, order), row.key), row) for row in listing)
        for place in self._store.newest_ended(view, listed, span):
            while ours and ours[-1][0] > place:
                yield ours.pop()[1]
            found = None if place[1] in newer else self.find(view, place[1])
            if found is not None and found[1] is not None and is_listed(found[1], listed, span):
                yield found[1]
        yield from (row for _, row in reversed(ours))

    def count_ended(self, view: str, listed: str, span: Span) -> int:
        """Return the number of ended rows in a part of a list. Raises StoreDamaged."""
        newer = self._unwritten(view)
        ours = sum(is_listed(row, listed, span) for _, row in newer.values())
        return ours + self._store.count_ended(view, listed, span, newer)

    def oldest_ended(self, view: str, listed: str) -> Row | None:
        """Return the ended row in a list that `newest_ended` yields last, None without one."""
        newer, order = self._unwritten(view), VIEWS[view].ORDER
        found = [row for _, row in newer.values() if row is not None and is_listed(row, listed, WHOLE)]
        for key in self._store.oldest_ended(view, listed):
            placed = None if key in newer else self.find(view, key)
            if placed is not None and placed[1] is not None and is_listed(placed[1], listed, WHOLE):
                found.append(placed[1])
                break
        return min(found, key=lambda row: (getattr(row, order), row.key), default=None)

    def _unwritten(self, view: str) -> dict[str, PlacedRow]:
        """Return the rows of a view that have changed since the store was written last."""
        with self._lock:
            flushing = {} if self._flushing is None else self._flushing.rows[view]
            return flushing | self._unflushed.rows[view]

    def waiting(self) -> tuple[int, int]:
        """Return the number of records that are not in the store yet, and their memory in bytes."""
        found = [one for one in (self._unflushed, self._flushing) if one is not None]
        return sum(one.records for one in found), sum(one.size for one in found)

    def take(self) -> tuple[Unflushed, LogPlace]:
        """Return the changes that the store does not have yet, and its place after them.

        Write them to the store, and call `flushed` before `take` is called again.
        """
        with self._lock:
            taken = self._flushing = self._unflushed
            self._unflushed = Unflushed()
            self._takes += 1
            ahead = dict(self._ahead)
        last = taken.last
        return taken, msgspec.structs.replace(
            self.place,
            offsets={**self.place.offsets, **{number: one.offset + 1 for number, one in last.items()}},
            digests={**self.place.digests, **{number: digest_of(one) for number, one in last.items()}},
            ahead=ahead,
        )

    def flushed(self, taken: Unflushed, place: LogPlace) -> None:
        """Note that the store has the changes that `take` returned and is at `place`."""
        with self._lock:
            for view, key, _ in taken.row_changes():
                self._recent.drop((view, key))
            for stream, entry, _ in taken.entry_changes():
                self._recent_entries.drop((stream, entry))
            self.place, self._flushing = place, None
            self._few_keys.clear()


class _LiveEntries:
    """The entries of one stream as a `LiveState` has them: an `EntrySource`."""

    __slots__ = ("_is_kept", "_state", "_stream")

    def __init__(self, state: LiveState, stream: str, *, is_kept: bool) -> None:
        self._state = state
        self._stream = stream
        self._is_kept = is_kept

    def get(self, key: str) -> bytes | None:
        return self._state.entry(self._stream, key, is_kept=self._is_kept)

    def keys(self, prefix: str, after: str, most: int) -> list[str]:
        return self._state.entry_keys(self._stream, prefix, after, most)


def _visible(
    read: Callable[[str, int], list[str]], after: str, most: int, hidden: Sequence[Writes]
) -> Iterator[str]:
    """Yield keys in order, without those that newer layers have changed. They are read in parts.

    A mailbox in use has many changed entries, nearly all of them deleted. So only those in the range are read.
    """
    while keys := read(after, most):
        yield from (key for key in keys if not any(key in writes for writes in hidden))
        if len(keys) < most:
            return
        after, most = keys[-1], min(2 * most, _KEYS_MOST)


def _place_of(store: GatewayStore) -> LogPlace:
    place = store.position()
    if place is None:
        raise StoreDamaged("the state store has no place in the log")
    return place


def _shown(record: Record, settled: Settled) -> SettledRecord:
    envelope = settled.envelope
    return SettledRecord(
        Position(record.partition, record.offset),
        f"{settled.stream_kind}/{settled.stream_id}",
        None if envelope is None else envelope.type,
        None if envelope is None else envelope.ce_id,
        None if envelope is None else f"{envelope.door}/{envelope.principal}",
        settled.verdict,
        settled.reason,
        settled.why,
        settled.late,
        settled.status_after,
        settled.seq,
        record.logged_at_us,
        record.value if settled.shown is None else settled.shown,
    )
