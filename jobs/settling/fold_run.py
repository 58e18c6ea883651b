"""The fold over the records of one partition in a micro-batch: a ledger row for each record.

On their way from Spark's Kafka source to the fold in Python, Kafka records are flat columns.
"""

from __future__ import annotations

import base64
import gc
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange, Change, Rows, Settled
from schemas.keys.sealing import Keyring
from schemas.streams.fold import settle
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.wire.record import MAC_HEADERS, STANDARD_HEADERS, Record
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import ACCEPTED, FOLD_FAILED

RECORD_COLUMNS: Final = (
    "topic",
    "partition",
    "offset",
    "timestamp",
    "key",
    "value",
    "usual_headers",
    "odd_headers",
)
SEPARATOR: Final = b"\x1f"


def record_columns(records: DataFrame) -> DataFrame:
    """Return the Kafka records with the columns RECORD_COLUMNS: their headers are in two flat columns.

    If a record has exactly the standard headers, or these and its MAC, `usual_headers`
    has their values as one binary cell, separated by SEPARATOR. Other headers (other names, missing values,
    values with the separator) are JSON in `odd_headers`. Both are null for a record without headers.

    Spark computes the size of an Arrow batch again after each record. For a list column, this takes time in
    proportion to the size, so there is none.
    """
    plain, with_mac = _joined(STANDARD_HEADERS), _joined(MAC_HEADERS)
    usual = F.coalesce(plain, with_mac)
    columns: dict[str, Column] = {
        "usual_headers": usual,
        "odd_headers": F.when(usual.isNull(), F.to_json("headers")),
    }
    return records.withColumns(columns).select(*RECORD_COLUMNS)


def _joined(names: tuple[str, ...]) -> Column:
    """Return the values of the headers with exactly these names, separated; null for any other record."""
    separator = F.lit(SEPARATOR)
    values = [F.get(F.col("headers"), F.lit(i))["value"] for i in range(len(names))]
    names_are_these = F.col("headers.key") == F.array(*[F.lit(name) for name in names])
    is_usual = names_are_these & ~F.contains(F.concat(*values), separator)
    separated = [part for value in values for part in (separator, value)][1:]
    return F.when(is_usual, F.concat(*separated))


def records_of(batch: pa.RecordBatch) -> list[Record]:
    """Return the Kafka records in a batch, one for each row, in the same order.

    The batch has the columns RECORD_COLUMNS, as `record_columns` makes them.
    """
    columns = {name: batch.column(name) for name in RECORD_COLUMNS}
    columns["timestamp"] = columns["timestamp"].cast(pa.int64())
    cells = zip(*(column.to_pylist() for column in columns.values()), strict=True)
    return [
        Record(topic, partition, offset, moment, key, value, *names_and_values(usual, odd))
        for topic, partition, offset, moment, key, value, usual, odd in cells
    ]


def names_and_values(usual: bytes | None, odd: str | None) -> tuple[tuple[str, ...], tuple[bytes | None, ...]]:
    """Return the names and the values of a record's headers, as two tuples of the same length.

    Args:
        usual: The cell `usual_headers`: values of the usual headers, separated by SEPARATOR. None: see
            `odd`.
        odd: The cell `odd_headers`: other headers as a JSON list. None for both: the record has no headers.
    """
    if usual is not None:
        values = tuple(usual.split(SEPARATOR))
        return MAC_HEADERS if len(values) == len(MAC_HEADERS) else STANDARD_HEADERS, values
    pairs = [] if odd is None else json.loads(odd)
    return (
        tuple(pair.get("key", "") for pair in pairs),
        tuple(None if one.get("value") is None else base64.b64decode(one["value"]) for one in pairs),
    )


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
