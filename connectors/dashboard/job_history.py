"""One job's timeline: its settled records, from memory and from the ledger, oldest first."""

from __future__ import annotations

from typing import Final

from connectors.dashboard.ledger_events_reader import HISTORY_RECORDS, history_of_job
from connectors.live.live_view import LiveView
from connectors.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from schemas.settings.settings import Settings
from schemas.wire.ids import JOB, stream_key

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
