"""The local store of a gateway: the entries of all streams and the rows of all views, at one place in the log.

Entries, rows and the place change in one transaction, which is on disk before it ends. The rows that are live
are apart from the rows that have ended, so that a start reads only the live ones. Ended rows are also in lists,
such as that of the completed jobs, in the order of a moment in the row. Of the messages in each final status,
the store has the newest 100,000 with their bodies; the tables have all (decision 0031).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from schemas.fold.view_rows import Row
from schemas.state_store.ended_lists import (
    LAST,
    MOMENT_BYTES,
    CountChanges,
    Span,
    count_listed,
    is_listed,
    list_key,
    listed_keys,
    place_of,
)
from schemas.state_store.local_store import (
    LocalStore,
    StoredEntries,
    checked,
    entry_key,
    get_checked,
    put_checked,
    write_entry,
)
from schemas.state_store.partition_store import EntryChange
from schemas.streams.fold import VIEWS
from schemas.streams.mailboxes.message import MESSAGE_FINAL, MessageBodyRow, MessageRow

# The keys of rows, and of their lists, are below the keys of entries, which begin with a letter.
_LIVE: Final = b"\x01"
_ENDED: Final = b"\x02"
# A transaction that reads keeps the pages that it sees from being used again, so a scan uses several.
_ROWS_AT_ONCE: Final = 1000

FINAL_MESSAGES_KEPT: Final = 100_000
"""The number of messages in each final status that a store keeps, the newest ones."""

PlacedRow = tuple[int, Row | None]
"""The offset of the record that last changed a row, and the row; None if the record removed it."""
RowChange = tuple[str, str, PlacedRow]
"""A view, the key of a row, and its new content."""


class LogPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place in the log up to which a store has all records, and what the store depends on.

    Attributes:
        epoch: The epoch of the topic.
        fold_version: The version of the fold that made entries and rows.
        form: The form of the stored rows: `row_form()` of the program that wrote them.
        offsets: The first offset that is not in the store, for each partition of the topic.
        digests: For each partition, the digest of the record before `offsets`. Empty without such a record.
        ahead: The streams whose entries have records at or beyond `offsets`, with the last such offset.
        rows_until: The highest offset of a row that was loaded from the tables, by partition.
    """

    epoch: int
    fold_version: int
    form: str
    offsets: dict[int, int]
    digests: dict[int, str]
    ahead: dict[str, int]
    rows_until: dict[int, int]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Any]).decode


# Raise it when `Row.is_live` or `Row.lists` of any view changes, or the bound on messages, or the keys below.
_FORM: Final = 2


def row_form() -> str:
    """Return a text that changes with the columns of the rows, and with `_FORM`."""
    columns = [[view.VIEW, view.ORDER, *view.__struct_fields__] for view in VIEWS.values()]
    return hashlib.sha256(_encode([_FORM, columns])).hexdigest()[:16]


class GatewayStore(LocalStore[LogPlace]):
    """The store of one gateway in `folder`, which is created. Only one process may have it open.

    Any thread may read. Within a process, open each folder only once.

    Args:
        folder: The folder of the store's files.
        is_synced: Whether each transaction is on disk when it ends.

    Raises:
        StoreDamaged: The file is no store, or is shorter than its content.
    """

    def __init__(self, folder: Path, *, is_synced: bool = True) -> None:
        super().__init__(folder, LogPlace, is_synced=is_synced)

    def entry(self, stream: str, entry: str) -> bytes | None:
        """Return the bytes of one entry, or None. Raises StoreDamaged if the checksum does not fit."""
        return self._read(entry_key(stream, entry))

    def entry_keys(self, stream: str, prefix: str, after: str, most: int) -> list[str]:
        """Return keys of a stream's entries in order, as `StoredEntries.keys` does. Raises StoreDamaged."""
        with self._reading() as transaction:
            return StoredEntries(transaction, stream).keys(prefix, after, most)

    def ended(self, view: str, key: str) -> PlacedRow | None:
        """Return a row that has ended, or None if there is no such row. Raises StoreDamaged.

        `key` may be any text, such as an id in a foreign record.
        """
        if not key.isascii():
            return None
        return _placed(view, self._read(_row_key(_ENDED, view, key)))

    def live_rows(self, view: str) -> Iterator[tuple[str, PlacedRow]]:
        """Yield the keys and the live rows of a view, also the removed ones. Raises StoreDamaged."""
        return self._rows(_LIVE, view)

    def ended_rows(self, view: str) -> Iterator[tuple[str, PlacedRow]]:
        """Yield the keys and the ended rows of a view in the order of their keys. Raises StoreDamaged.

        Rows that are written during the iteration may be among them.
        """
        return self._rows(_ENDED, view)

    def newest_ended(self, view: str, listed: str, span: Span) -> Iterator[tuple[int, str]]:
        """Yield the moments and the keys of the ended rows in a part of a list, the newest first.

        Args:
            view: The name of the view.
            listed: The name of the list, one of `Row.lists`.
            span: The part of the list.
        """
        prefix = list_key(view, listed)
        bound = prefix + (LAST if span.before is None else place_of(*span.before))
        while True:
            found = self._keys_below(prefix, bound)
            for key in found:
                moment = int.from_bytes(key[:MOMENT_BYTES], "big")
                if moment < span.since:
                    return
                yield moment, key[MOMENT_BYTES:].decode("ascii")
            if len(found) < _ROWS_AT_ONCE:
                return
            bound = prefix + found[-1]

    def count_ended(self, view: str, listed: str, span: Span, besides: Iterable[str]) -> int:
        """Return the number of ended rows in a part of a list, by counts of the list and of blocks of time.

        Args:
            view: The name of the view.
            listed: The name of the list, one of `Row.lists`.
            span: The part of the list.
            besides: The keys of rows that are not counted.
        """
        with self._reading() as transaction:
            found = count_listed(transaction, view, listed, span)
            for key in besides:
                known = _placed(view, get_checked(transaction, _row_key(_ENDED, view, key)))
                found -= known is not None and is_listed(known[1], listed, span)
        return found

    def oldest_ended(self, view: str, listed: str) -> Iterator[str]:
        """Yield the keys of the ended rows in a list, up to 1,000 of them, the oldest first."""
        prefix = list_key(view, listed)
        with self._reading() as transaction, transaction.cursor() as cursor:
            is_there, found = cursor.set_range(prefix), list[str]()
            while is_there and len(found) < _ROWS_AT_ONCE and (key := bytes(cursor.key())).startswith(prefix):
                found.append(key[len(prefix) + MOMENT_BYTES :].decode("ascii"))
                is_there = cursor.next()
        yield from found

    def streams(self) -> list[str]:
        """Return the names of all streams with entries, in order."""
        found, key = [], b"a"
        with self._reading() as transaction, transaction.cursor() as cursor:
            while cursor.set_range(key):
                stream = bytes(cursor.key()).partition(b"\x00")[0]
                found.append(stream.decode("ascii"))
                key = stream + b"\x01"
        return found

    def advance(
        self,
        before: LogPlace,
        after: LogPlace,
        entries: Iterable[EntryChange],
        rows: Iterable[RowChange],
    ) -> None:
        """Bring the store from one place in the log to a later one. All of it or nothing.

        Args:
            before: The place that the store has.
            after: Its new place.
            entries: The last change of each entry.
            rows: The last change of each row.

        Raises:
            StoreMoved: The store has another place.
            lmdb.Error: The store cannot be written, for instance because the disk is full.
        """
        with self._changing(before) as transaction:
            self._write(transaction, entries, rows)
            self._move(transaction, after)

    def load(self, entries: Iterable[EntryChange], rows: Iterable[RowChange]) -> None:
        """Add entries and rows to a store without a place. All of it or nothing.

        Raises:
            StoreMoved: The store has a place.
        """
        with self._changing(None) as transaction:
            self._write(transaction, entries, rows)

    def finish_load(self, place: LogPlace) -> None:
        """Give a place to a store that has none, once everything before is on disk.

        Raises:
            StoreMoved: The store has a place.
        """
        self._env.sync(True)
        with self._changing(None) as transaction:
            self._move(transaction, place)
        self._env.sync(True)

    def _write(
        self, transaction: lmdb.Transaction, entries: Iterable[EntryChange], rows: Iterable[RowChange]
    ) -> None:
        for stream, entry, value in entries:
            write_entry(transaction, stream, entry, value)
        counts = CountChanges()
        for view, key, placed in rows:
            _write_row(transaction, view, key, placed, counts)
        for status in MESSAGE_FINAL:
            too_many = counts.number(transaction, MessageRow.VIEW, status) - FINAL_MESSAGES_KEPT
            if too_many > 0:
                _drop_oldest_messages(transaction, status, too_many, counts)
        counts.write(transaction)

    def _rows(self, kind: bytes, view: str) -> Iterator[tuple[str, PlacedRow]]:
        prefix = after = _row_key(kind, view, "")
        while True:
            found: list[tuple[bytes, bytes]] = []
            with self._reading() as transaction, transaction.cursor() as cursor:
                is_there = cursor.set_range(after)
                while (
                    is_there and len(found) < _ROWS_AT_ONCE and (key := bytes(cursor.key())).startswith(prefix)
                ):
                    found.append((key, checked(key, bytes(cursor.value()))))
                    is_there = cursor.next()
            for key, raw in found:
                yield key[len(prefix) :].decode("ascii"), _decoded(view, raw)
            if len(found) < _ROWS_AT_ONCE:
                return
            after = found[-1][0] + b"\x00"

    def _keys_below(self, prefix: bytes, bound: bytes) -> list[bytes]:
        """Return up to 1,000 keys with a prefix that are below a bound, without the prefix, the last first."""
        found: list[bytes] = []
        with self._reading() as transaction, transaction.cursor() as cursor:
            is_there = cursor.prev() if cursor.set_range(bound) else cursor.last()
            while is_there and len(found) < _ROWS_AT_ONCE and (key := bytes(cursor.key())).startswith(prefix):
                found.append(key[len(prefix) :])
                is_there = cursor.prev()
        return found


def _write_row(
    transaction: lmdb.Transaction, view: str, key: str, placed: PlacedRow, counts: CountChanges
) -> None:
    """Write a row among the live or the ended ones, and update the lists.

    Each call of LMDB lets the other threads of Python go first, so there are as few as possible.
    """
    live, row, value = _row_key(_LIVE, view, key), placed[1], _stored(placed)
    if VIEWS[view].is_live is Row.is_live:
        put_checked(transaction, live, value)
        return  # no row of this view ever ends
    ended, known = _row_key(_ENDED, view, key), None
    is_ended = row is not None and not row.is_live
    if not (is_ended and put_checked(transaction, ended, value, is_new=True)):
        known = _placed(view, get_checked(transaction, ended))
        put_checked(transaction, ended if is_ended else live, value)
    if is_ended:
        transaction.delete(live)
    elif known is not None:
        transaction.delete(ended)
    before = listed_keys(key, None if known is None else known[1])
    after = listed_keys(key, row if is_ended else None)
    for listed in before - after:
        transaction.delete(listed)
        counts.add(listed, -1)
    for listed in after - before:
        transaction.put(listed, b"")
        counts.add(listed, 1)


def _drop_oldest_messages(transaction: lmdb.Transaction, status: str, most: int, counts: CountChanges) -> None:
    """Delete the messages with a final status that ended first, with their bodies."""
    prefix, found = list_key(MessageRow.VIEW, status), list[bytes]()
    with transaction.cursor() as cursor:
        is_there = cursor.set_range(prefix)
        while is_there and len(found) < most and (listed := bytes(cursor.key())).startswith(prefix):
            found.append(listed)
            is_there = cursor.next()
    for listed in found:
        key = listed[len(prefix) + MOMENT_BYTES :].decode("ascii")
        transaction.delete(listed)
        transaction.delete(_row_key(_ENDED, MessageRow.VIEW, key))
        transaction.delete(_row_key(_ENDED, MessageBodyRow.VIEW, key))
        counts.add(listed, -1)


def _row_key(kind: bytes, view: str, key: str) -> bytes:
    return kind + f"{view}\x00{key}".encode("ascii")


def _stored(placed: PlacedRow) -> bytes:
    offset, row = placed
    return _encode((offset,) if row is None else (offset, *msgspec.structs.astuple(row)))


def _placed(view: str, raw: bytes | None) -> PlacedRow | None:
    return None if raw is None else _decoded(view, raw)


def _decoded(view: str, raw: bytes) -> PlacedRow:
    offset, *columns = _decode(raw)
    return offset, VIEWS[view](*columns) if columns else None
