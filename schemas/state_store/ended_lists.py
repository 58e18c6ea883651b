"""The lists of the ended rows in a gateway's store, such as that of the completed jobs, with counts.

A list has a key for each row, in the order of a moment in the row. It has a count of all its rows, and one for
each block of time, so that a part of a list is counted without a look at each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import lmdb
import msgspec

from schemas.fold.view_rows import Row
from schemas.state_store.local_store import checked, get_checked, put_checked

_LIST: Final = b"\x03"
_COUNT: Final = b"\x04"
_BLOCK: Final = b"\x05"
MOMENT_BYTES: Final = 8
# Beyond each place in a list.
LAST: Final = b"\xff" * (MOMENT_BYTES + 1)
# A block has the rows of 2**34 or 2**25 microseconds: of 4.8 hours, or of 34 seconds.
_BLOCKS: Final = (34, 25)


class Span(msgspec.Struct, frozen=True):
    """A part of a list of ended rows.

    Attributes:
        since: Only rows of this moment or later ones.
        before: Moment and key of a row. Only rows before it. None: no bound.
    """

    since: int = 0
    before: tuple[int, str] | None = None


WHOLE: Final = Span()


def is_listed(row: Row | None, listed: str, span: Span) -> bool:
    """Return whether a row has ended and is in a part of a list."""
    if row is None or row.is_live or not row.ORDER or listed not in row.lists:
        return False
    place = (getattr(row, row.ORDER) or 0, row.key)
    return span.since <= place[0] and (span.before is None or place < span.before)


def list_key(view: str, listed: str) -> bytes:
    """Return the bytes with which the keys of a list begin. Then comes the place of the row."""
    return _LIST + _name(view, listed)


def place_of(moment: int | None, key: str) -> bytes:
    """Return the place of a row in a list, by the moment and the key of the row."""
    return _packed(moment or 0) + key.encode("ascii")


def listed_keys(key: str, row: Row | None) -> set[bytes]:
    """Return the keys of an ended row in its lists. None: there is no such row, so there are none."""
    if row is None or not row.ORDER:
        return set()
    place = place_of(getattr(row, row.ORDER), key)
    return {list_key(row.VIEW, listed) + place for listed in row.lists}


class CountChanges:
    """The changes of counts that a transaction makes. Call `write` at its end."""

    def __init__(self) -> None:
        self._changes: dict[bytes, int] = {}

    def add(self, key: bytes, change: int) -> None:
        """Note that the key of a row in a list is added (1) or removed (-1)."""
        end = key.index(b"\x00", key.index(b"\x00") + 1) + 1
        name, moment = key[1:end], int.from_bytes(key[end : end + MOMENT_BYTES], "big")
        blocks = (_block_key(name, shift, moment >> shift) for shift in _BLOCKS)
        for counted in (_COUNT + name, *blocks):
            self._changes[counted] = self._changes.get(counted, 0) + change

    def number(self, transaction: lmdb.Transaction, view: str, listed: str) -> int:
        """Return the number of rows of a list after the changes. Raises StoreDamaged."""
        counted = _COUNT + _name(view, listed)
        return _number(transaction, counted) + self._changes.get(counted, 0)

    def write(self, transaction: lmdb.Transaction) -> None:
        """Write the changes to the store. Raises StoreDamaged."""
        for counted, change in self._changes.items():
            if change and (number := _number(transaction, counted) + change):
                put_checked(transaction, counted, _packed(number))
            elif change:
                transaction.delete(counted)


def count_listed(transaction: lmdb.Transaction, view: str, listed: str, span: Span) -> int:
    """Return the number of rows in a part of a list, by the counts. Raises StoreDamaged."""
    name = _name(view, listed)
    if span.before is None:
        until = _number(transaction, _COUNT + name)
    else:
        until = _number_before(transaction, name, place_of(*span.before))
    return max(0, until - (_number_before(transaction, name, place_of(span.since, "")) if span.since else 0))


def _number_before(transaction: lmdb.Transaction, name: bytes, place: bytes) -> int:
    """Return the number of rows of a list that are before a place."""
    moment, begin, found = int.from_bytes(place[:MOMENT_BYTES], "big"), 0, 0
    for shift in _BLOCKS:
        first, last = (_block_key(name, shift, one >> shift) for one in (begin, moment))
        found += sum(int.from_bytes(checked(*one), "big") for one in _between(transaction, first, last))
        begin = moment >> shift << shift
    keys = _between(transaction, _LIST + name + _packed(begin), _LIST + name + place)
    return found + sum(1 for _ in keys)


def _between(transaction: lmdb.Transaction, first: bytes, last: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values from a key up to but not including another one."""
    with transaction.cursor() as cursor:
        is_there = cursor.set_range(first)
        while is_there and (key := bytes(cursor.key())) < last:
            yield key, bytes(cursor.value())
            is_there = cursor.next()


def _number(transaction: lmdb.Transaction, counted: bytes) -> int:
    raw = get_checked(transaction, counted)
    return 0 if raw is None else int.from_bytes(raw, "big")


def _block_key(name: bytes, shift: int, block: int) -> bytes:
    return _BLOCK + name + bytes([shift]) + _packed(block)


def _packed(number: int) -> bytes:
    return number.to_bytes(MOMENT_BYTES, "big")


def _name(view: str, listed: str) -> bytes:
    return f"{view}\x00{listed}\x00".encode("ascii")
