"""The fold over the records of one partition in a micro-batch: a ledger row for each record."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange, Change, Rows, Settled
from schemas.keys.sealing import Keyring
from schemas.streams.fold import settle
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.wire.record import Record
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import ACCEPTED, FOLD_FAILED


class OrderError(TrunklineError):
    """The records of a partition do not follow the ledger's end, or are out of order. The query must stop."""


def check_order(records: list[Record], first_offset: int) -> None:
    """Check that no record is before `first_offset` and that their offsets rise.

    A gap is no disorder: the end of a transaction of another program takes an offset without a record. The
    driver checks a gap at the beginning (log_checks.py).

    Raises:
        OrderError: a record is before `first_offset`, or an offset does not rise.
    """
    wanted = first_offset
    for record in records:
        if record.offset < wanted:
            raise OrderError(
                f"{record.topic}-{record.partition}: offset {record.offset} comes where {wanted} must follow; "
                "the micro-batch was not settled"
            )
        wanted = record.offset + 1


class _FoldFailedError(Exception):
    """The fold has failed in a run that is not careful."""


def settle_run(
    records: list[Record],
    open_stream: Callable[[bytes | None], Entries],
    keyring: Keyring,
    macs_key: bytes = b"",
) -> list[LedgerRow]:
    """Settle the records of one partition in a micro-batch, and return their ledger rows in the same order.

    The last row of each stream contains all changes of the micro-batch to the stream state and to view rows.
    The result is that of settling the records one by one; state is decoded and encoded once for each stream.

    Args:
        records: The records, in the order of their offsets.
        open_stream: Returns a new object with the state of a stream before the first record, by the key of its
            records. It is called again after a failure of the fold. The states that it returned are updated.
        keyring: The master keys for secrets and MACs of records.
        macs_key: The key of the partition's stream `macs_stream`, whose state must be in memory. Empty: no
            record needs a MAC.

    Raises:
        MissingKeyError: A MAC is under a master key that is missing here.
    """
    with no_collection():
        try:
            return _rows_of(records, open_stream, keyring, macs_key, is_careful=False)
        except _FoldFailedError:
            # The failed fold may have changed a struct that earlier records share.
            return _rows_of(records, open_stream, keyring, macs_key, is_careful=True)


def _rows_of(
    records: list[Record],
    open_stream: Callable[[bytes | None], Entries],
    keyring: Keyring,
    macs_key: bytes,
    *,
    is_careful: bool,
) -> list[LedgerRow]:
    """Settle the records. Raises _FoldFailedError at a failure of the fold, unless each record is encoded."""
    last = {record.key: position for position, record in enumerate(records)}
    macs = open_stream(macs_key) if macs_key else Entries()
    streams: dict[bytes | None, _Stream] = {}
    rows: list[LedgerRow] = []
    for position, record in enumerate(records):
        key = record.key
        stream = streams.get(key)
        if stream is None:
            entries = macs if key == macs_key else open_stream(key)
            stream = streams[key] = _Stream(entries, is_careful=is_careful)
        settled = stream.settle(record, keyring, macs)
        if settled.reason == FOLD_FAILED and not is_careful:
            raise _FoldFailedError
        if last[key] == position:
            del streams[key]
            changed, writes = stream.changes(), stream.entries.take_writes()
            rows.append(ledger_row(record, settled, keyring, changed, writes, stream.accepted_offset))
        else:
            rows.append(ledger_row(record, settled, keyring))
    return rows


class _Stream:
    """A stream in a micro-batch: its state, and the effect of the records so far.

    A careful one encodes its state after each record, so that a failure of the fold does no harm to it.
    """

    __slots__ = ("_changes", "_is_careful", "_rows", "accepted_offset", "entries")

    def __init__(self, entries: Entries, *, is_careful: bool) -> None:
        self.entries = entries
        self.accepted_offset: int | None = None
        self._is_careful = is_careful
        self._changes: dict[tuple[str, str], AppliedChange] = {}
        self._rows: Rows | None = None

    def settle(self, record: Record, keyring: Keyring, macs: Entries) -> Settled:
        """Settle the stream's next record."""
        settled = settle(record, self.entries, keyring, macs, in_run=not self._is_careful)
        if settled.verdict == ACCEPTED:
            self.accepted_offset = record.offset
            self._rows = settled.rows
            if settled.changes:
                self._add(settled.changes, record.offset)
        return settled

    def changes(self) -> Collection[AppliedChange]:
        """Return the last change of each row. Call it after the stream's last record."""
        if self._rows is not None and self.accepted_offset is not None:
            self._add(self._rows(), self.accepted_offset)
        return self._changes.values()

    def _add(self, changes: tuple[Change, ...], offset: int) -> None:
        for change in changes:
            self._changes[change.view, change.key] = AppliedChange(change.view, change.key, offset, change.row)


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch Python's garbage collector off for the length of the block."""
    # The many rows of a run have no cycles, but the collector would scan them again and again. That took a
    # third of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
