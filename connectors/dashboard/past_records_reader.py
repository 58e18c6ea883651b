"""Settled records of the past, read from memory and from the ledger.

They are the records that a reader missed, one job's history, and rejections before the start of the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from connectors.ledger_files.ledger_reader import LedgerFilter
from connectors.live.live_view import LiveView
from connectors.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from connectors.live.verdict_reader import newest_where, settled_where
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.wire.ids import JOB, stream_key
from schemas.wire.verdicts import REJECTED

HISTORY_RECORDS: Final = 500


def records_between(settings: Settings, ranges: Mapping[int, tuple[int, int]]) -> list[SettledRecord]:
    """Return the records of these ranges of offsets, by partition, as far as the ledger has them.

    A range's end is exclusive. Raises TrunklineError.
    """
    terms = [
        (pc.field("partition") == partition) & (pc.field("offset") >= first) & (pc.field("offset") < end)
        for partition, (first, end) in ranges.items()
    ]
    return settled_where(settings, reduce(lambda left, right: left | right, terms)) if terms else []


def history_of_job(settings: Settings, job_id: str) -> list[SettledRecord]:
    """Return the newest records of a job. Raises TrunklineError."""
    return newest_where(settings, LedgerFilter(stream_kind=JOB, stream_id=job_id), HISTORY_RECORDS)


def newest_rejected(settings: Settings, count: int) -> list[SettledRecord]:
    """Return the newest records that were rejected, oldest first. Raises TrunklineError."""
    return newest_where(settings, LedgerFilter(verdict=REJECTED), count)


def rejected_before(settings: Settings, offsets: Mapping[int, int]) -> dict[str, int]:
    """Return the number of rejected records before these offsets, by reason. Raises TrunklineError."""
    path = settings.table_path(LEDGER)
    terms = [
        (pc.field("partition") == partition) & (pc.field("offset") < offset)
        for partition, offset in offsets.items()
    ]
    try:
        if not terms or not DeltaTable.is_deltatable(path):
            return {}
        where = (pc.field("verdict") == REJECTED) & reduce(lambda left, right: left | right, terms)
        found = dataset_of(DeltaTable(path)).to_table(filter=where, columns=["reason"])
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise TrunklineError(f"the ledger at {path} cannot be read: {error}") from error
    counts = pc.value_counts(found.column("reason")).to_pylist()
    return {one["values"]: one["counts"] for one in counts if one["values"] is not None}


_ALL: Final = 1_000_000


def job_history(
    settings: Settings, live_view: LiveView, job_id: str, after: int | None
) -> tuple[list[SettledRecord], bool]:
    """Return the newest records of a job after this offset, and whether older ones may be left out.

    The records come from memory and from the ledger, oldest first. `after` is an offset of the job's partition.
    Raises TrunklineError when the ledger cannot be read.
    """
    stream = stream_key(JOB, job_id)
    in_memory = [record for record in records_in_memory(live_view.feed) if record.stream == stream]
    found = {record.position: record for record in in_memory}
    # A caller that has the job up to a record in memory gets all later records from memory.
    if after is None or all(position.offset > after for position in found):
        for record in history_of_job(settings, job_id):
            found.setdefault(record.position, record)
    wanted = [found[position] for position in sorted(found) if after is None or position.offset > after]
    return wanted[-HISTORY_RECORDS:], after is None and len(wanted) >= HISTORY_RECORDS


def records_in_memory(feed: SettledFeed) -> list[SettledRecord]:
    """Return all records that a feed holds, in the order of settling."""
    cursor = 0
    while True:
        try:
            return feed.since(cursor, _ALL)[0]
        except FellBehind as error:
            cursor = error.oldest
