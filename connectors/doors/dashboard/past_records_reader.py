"""Reads of past settled records from memory and from the ledger.

They are the records that a reader missed, one job's history, and rejections before the start of the gateway.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import reduce
from typing import Final

import pyarrow.compute as pc

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from connectors.hub.live.verdict_reader import ledger_rows, newest_where, settled_where
from connectors.log.ledger_files.ledger_reader import LedgerFilter
from schemas.settings.settings import Settings
from trunkline_agent.wire.ids import JOB, stream_key
from trunkline_agent.wire.verdicts import REJECTED

HISTORY_RECORDS: Final = 500


def records_between(settings: Settings, ranges: Mapping[int, tuple[int, int]]) -> list[SettledRecord]:
    """Read the records in these ranges of offsets from the ledger, and return them in no order.

    `ranges` maps a partition to `(first, end)`; `end` is exclusive. Records that are not in the ledger yet are
    missing in the result; no error says so. Raises TrunklineError if the ledger cannot be read.
    """
    return settled_where(settings, _within(ranges)) if ranges else []


def rejected_before(settings: Settings, offsets: Mapping[int, int]) -> dict[str, int]:
    """Read the ledger, and return the number of its rejected records by reason, such as `bad_signature`.

    `offsets` maps a partition to an offset. Only records before this offset are counted, and no records of
    other partitions. The result is empty if there is no ledger. Raises TrunklineError if the ledger cannot be
    read.
    """
    if not offsets:
        return {}
    where = (pc.field("verdict") == REJECTED) & _within({number: (0, end) for number, end in offsets.items()})
    reasons = ledger_rows(settings, where, ["reason"]).column("reason").drop_null()
    return {one["values"]: one["counts"] for one in pc.value_counts(reasons).to_pylist()}


def _within(ranges: Mapping[int, tuple[int, int]]) -> pc.Expression:
    terms = [
        (pc.field("partition") == partition) & (pc.field("offset") >= first) & (pc.field("offset") < end)
        for partition, (first, end) in ranges.items()
    ]
    return reduce(operator.or_, terms)


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
        where = LedgerFilter(stream_kind=JOB, stream_id=job_id)
        for record in newest_where(settings, where, HISTORY_RECORDS):
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
