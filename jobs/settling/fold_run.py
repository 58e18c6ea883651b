"""The fold over the records of one partition in a micro-batch: a ledger row for each record."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from schemas.errors import TrunklineError
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring
from schemas.streams.fold import settle
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.wire.record import Record
from schemas.wire.verdicts import ACCEPTED


class OrderError(TrunklineError):
    """The records of a partition do not follow the ledger's end, or are out of order. The query must stop."""


def check_order(records: list[Record], first_offset: int) -> None:
    """Check that the records begin at `first_offset` and that their offsets rise.

    The topic never loses a record in the middle, so the first record of a micro-batch is the one after the
    ledger's last. Later gaps are no disorder: Kafka may leave out offsets.

    Raises:
        OrderError: the first record has another offset, or an offset does not rise.
    """
    wanted = first_offset
    for number, record in enumerate(records):
        if record.offset < wanted or (number == 0 and record.offset != first_offset):
            raise OrderError(
                f"{record.topic}-{record.partition}: offset {record.offset} comes where {wanted} must follow; "
                "the micro-batch was not settled"
            )
        wanted = record.offset + 1


def settle_run(
    records: list[Record],
    entries: Mapping[bytes | None, Entries],
    keyring: Keyring,
    macs: Entries,
) -> list[LedgerRow]:
    """Settle the records of one partition in a micro-batch, and return their ledger rows in the same order.

    The last row of each stream contains all changes of the micro-batch to the stream state and to view rows.

    Args:
        records: The records, in the order of their offsets.
        entries: The stream state for each record key. The key of every record must be in it. The states are
            updated.
        keyring: The master keys for secrets and MACs of records.
        macs: The state of the partition's stream `macs_stream`, which is also in `entries` if a record has its
            key.

    Raises:
        MissingKeyError: A MAC is under a master key that is missing here.
    """
    last = {record.key: position for position, record in enumerate(records)}
    changes: dict[bytes | None, dict[tuple[str, str], AppliedChange]] = {}
    accepted: dict[bytes | None, int] = {}
    rows = []
    with no_collection():
        for position, record in enumerate(records):
            stream = entries[record.key]
            settled = settle(record, stream, keyring, macs)
            if settled.verdict == ACCEPTED:
                accepted[record.key] = record.offset
            for change in settled.changes:
                applied = AppliedChange(change.view, change.key, record.offset, change.row)
                changes.setdefault(record.key, {})[change.view, change.key] = applied
            if last[record.key] == position:
                changed = changes.pop(record.key, {}).values()
                writes, offset = stream.take_writes(), accepted.get(record.key)
                rows.append(ledger_row(record, settled, keyring, changed, writes, offset))
            else:
                rows.append(ledger_row(record, settled, keyring))
    return rows


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
