"""Reads of past settled records from memory and from the ledger.

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

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from connectors.hub.live.verdict_reader import newest_where, settled_where
from connectors.log.ledger_files.ledger_reader import LedgerFilter
from schemas.settings.settings import Settings
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import JOB, stream_key
from trunkline_agent.wire.verdicts import REJECTED

HISTORY_RECORDS: Final = 500


def records_between(settings: Settings, ranges: Mapping[int, tuple[int, int]]) -> list[SettledRecord]:
    """Read the records in these ranges of offsets from the ledger, and return them in no order.

    `ranges` maps a partition to `(first, end)`; `end` is exclusive. Records that are not in the ledger yet are
    missing in the result; no error says so. Raises TrunklineError if the ledger cannot be read.
    """
    terms = [
        (pc.field("partition") == partition) & (pc.field("offset") >= first) & (pc.field("offset") < end)
        for partition, (first, end) in ranges.items()
    ]
    return settled_where(settings, reduce(lambda left, right: left | right, terms)) if terms else []


def history_of_job(settings: Settings, job_id: str) -> list[SettledRecord]:
    """Read the newest 500 records of a job from the ledger, and return them oldest first.

    The list is empty for an unknown job. Raises TrunklineError if the ledger cannot be read.
    """
    return newest_where(settings, LedgerFilter(stream_kind=JOB, stream_id=job_id), HISTORY_RECORDS)


def newest_rejected(settings: Settings, count: int) -> list[SettledRecord]:
    """Read the newest `count` rejected records from the ledger, and return them oldest first.

    The list may be shorter. Raises TrunklineError if the ledger cannot be read.
    """
    return newest_where(settings, LedgerFilter(verdict=REJECTED), count)


def rejected_before(settings: Settings, offsets: Mapping[int, int]) -> dict[str, int]:
    """Read the ledger, and return the number of its rejected records by reason, such as `bad_signature`.

    `offsets` maps a partition to an offset. Only records before this offset are counted, and no records of
    other partitions. The result is empty if there is no ledger. Raises TrunklineError if the ledger cannot be
    read.
    """
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
    """Return a job's newest records, at most 500 and oldest first, and whether older ones may be missing.

    Without `after`, the second result is True if 500 or more records were found. With `after`, it is always
    False: of more than 500 later records the oldest ones are left out, and nothing reports that. So it is for
    catching up by a few records, and not for paging. The function reads the ledger: call it in a thread, and
    not in the event loop.

    Args:
        settings: The settings, for the path of the ledger.
        live_view: The live view, whose records in memory are newer than the ledger's.
        job_id: The id of the job. An unknown id gives an empty list.
        after: Return only records beyond this offset of the job's partition. None means from the beginning.

    Raises:
        TrunklineError: The ledger cannot be read. It is not read if memory has all records after `after`.
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
    """Return all records that this feed still has in memory, in the order in which they were settled."""
    cursor = 0
    while True:
        try:
            return feed.since(cursor, _ALL)[0]
        except FellBehind as error:
            cursor = error.oldest
