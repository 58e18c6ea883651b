"""One job's timeline: its settled records, from memory and from the ledger, oldest first."""

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
    """The records of these partitions from the first offset up to the second, exclusive, as far as the ledger
    has them. Raises TrunklineError.
    """
    terms = [
        (pc.field("partition") == partition) & (pc.field("offset") >= first) & (pc.field("offset") < end)
        for partition, (first, end) in ranges.items()
    ]
    return settled_where(settings, reduce(lambda left, right: left | right, terms)) if terms else []


def history_of_job(settings: Settings, job_id: str) -> list[SettledRecord]:
    """The newest records of a job. Raises TrunklineError."""
    return newest_where(settings, LedgerFilter(stream_kind=JOB, stream_id=job_id), HISTORY_RECORDS)


def newest_rejected(settings: Settings, count: int) -> list[SettledRecord]:
    """The newest records that were rejected, oldest first. Raises TrunklineError."""
    return newest_where(settings, LedgerFilter(verdict=REJECTED), count)


def rejected_before(settings: Settings, offsets: Mapping[int, int]) -> dict[str, int]:
    """By reason, how many records before these offsets were rejected. Raises TrunklineError."""
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
    """The newest records of a job after this offset of its partition, and whether there may be older ones that
    are left out. Raises TrunklineError when the ledger cannot be read.
    """
    stream = stream_key(JOB, job_id)
    in_memory = [record for record in records_in_memory(live_view.feed) if record.stream == stream]
    found = {record.position: record for record in in_memory}
    # Who has the job up to a record that is in memory gets all that came since from there.
    if after is None or all(position.offset > after for position in found):
        for record in history_of_job(settings, job_id):
            found.setdefault(record.position, record)
    wanted = [found[position] for position in sorted(found) if after is None or position.offset > after]
    return wanted[-HISTORY_RECORDS:], after is None and len(wanted) >= HISTORY_RECORDS


def records_in_memory(feed: SettledFeed) -> list[SettledRecord]:
    """All records that a feed holds, as they were settled."""
    cursor = 0
    while True:
        try:
            return feed.since(cursor, _ALL)[0]
        except FellBehind as error:
            cursor = error.oldest
