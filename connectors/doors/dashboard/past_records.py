"""The JSON form of rows and records in the dashboard's answers, and its past records, from memory and ledger.

Times are milliseconds since 1970 UTC. The past records are those that a reader missed, one job's history, and
rejected records: the count of each reason, and the newest records of each reason.
"""

from __future__ import annotations

import operator
import threading
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, Final

import msgspec
import pyarrow.compute as pc
import structlog

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowLists, job_lists
from connectors.hub.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from connectors.hub.live.table_reader import ledger_rows, newest_where, settled_where
from connectors.hub.services.settled_stream import PUBLIC_KINDS, settled_as_json
from connectors.log.ledger_files.ledger_reader import LedgerFilter
from schemas.fold.view_rows import Row
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_REGISTERED, JOB_SECRET_ROTATED, JobRow
from schemas.streams.principal.principals import OPERATOR
from schemas.streams.task.task_registry import TaskRow
from schemas.streams.webhook.webhooks import WEBHOOK_SET
from schemas.wire.record import Position
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import CONTROL, JOB, PRINCIPAL, stream_key
from trunkline_agent.wire.verdicts import FOLD_FAILED, REJECTED

_TEXT: Final = 300
_RAW_BYTES: Final = 4096
# Only the operator may see principals and the records about the topic.
_OPERATORS_KINDS: Final = frozenset({PRINCIPAL, CONTROL})
# The bodies of these records hold hashes and sealed secrets, which can be removed only from a JSON object.
_NEVER_RAW: Final = (JOB_REGISTERED, JOB_SECRET_ROTATED, WEBHOOK_SET)


def milliseconds(moment: int | None) -> int | None:
    """Convert a time in microseconds since 1970 UTC to milliseconds. None, for an unknown time, stays None."""
    return None if moment is None else moment // 1000


def shortened(text: str | None) -> str | None:
    """Return a text cut to 300 characters, with `…` as the last one if it was longer. None stays None."""
    return text if text is None or len(text) <= _TEXT else text[: _TEXT - 1] + "…"


class RowView:
    """The columns of a view's rows that the dashboard shows.

    A column of `moments`, such as `started_at`, is shown in milliseconds under a name like `started_ms`.

    Args:
        row_type: The class of the rows.
        columns: The columns that are shown as they are, separated by spaces.
        texts: The columns whose texts are cut to 300 characters.
        moments: The columns that hold moments.
    """

    def __init__(self, row_type: type[Row], columns: str, *, texts: str = "", moments: str = "") -> None:
        self._columns, self._texts, self._moments = columns.split(), texts.split(), moments.split()
        shown = {*self._columns, *self._texts, *self._moments}
        if unknown := shown - set(row_type.__struct_fields__):
            raise TypeError(f"{row_type.__name__} has no {', '.join(sorted(unknown))}")

    def of(self, row: Row) -> dict[str, Any]:
        """Return the shown columns of a row as JSON."""
        found = {name: getattr(row, name) for name in self._columns}
        found |= {name: shortened(getattr(row, name)) for name in self._texts}
        for name in self._moments:
            found[f"{name.removesuffix('_at')}_ms"] = milliseconds(getattr(row, name))
        return found


_JOB: Final = RowView(
    JobRow,
    "job_id status registered_by last_event last_seq events",
    texts="description last_detail",
    moments="registered_at picked_at started_at ended_at",
)
_TASK: Final = RowView(
    TaskRow, "task_id status", texts="description error", moments="submitted_at started_at ended_at"
)


def job_as_json(live_view: LiveView, row: JobRow) -> dict[str, Any]:
    """Return the row of a job as JSON for the dashboard, with texts cut to 300 characters.

    `offset` is the log offset of the record that made the row. Of two JSON versions of one job, the one with
    the higher `offset` is newer.
    """
    return {
        **_JOB.of(row),
        "session": row.session or row.session_wanted,
        "offset": live_view.row_offset(JobRow.VIEW, row.job_id),
    }


def task_as_json(live_view: LiveView, row: TaskRow) -> dict[str, Any]:
    """Return the row of a task as JSON for the dashboard, with texts cut to 300 characters.

    `offset` has the same meaning as for `job_as_json`.
    """
    return {
        **_TASK.of(row),
        "agent": row.agent_name,
        "offset": live_view.row_offset(TaskRow.VIEW, row.task_id),
    }


def jobs_page(
    live_view: LiveView, lists: RowLists, state: str | None, after: str | None, limit: int
) -> dict[str, Any]:
    """Return one page of jobs as JSON, newest first.

    Args:
        live_view: The view that the jobs are read from.
        lists: The view's lists.
        state: Only jobs in this state, such as `running`. None means all states.
        after: The id of the last job of the previous page. None, or an unknown id, means the first page.
        limit: The most jobs on the page.

    Returns:
        `jobs`, the list, and `next`, which is the `after` of the following page. `next` is None on the last
        page.
    """
    last = None if after is None else live_view.get(JobRow, after)
    before = None if last is None else (last.registered_at, last.job_id)
    newest = lists.jobs.newest(job_lists(state, None), limit + 1, before=before)
    return {
        "jobs": [job_as_json(live_view, row) for row in newest[:limit]],
        "next": newest[limit - 1].job_id if len(newest) > limit else None,
    }


def is_shown(record: SettledRecord, role: str) -> bool:
    """Return whether a caller with this role may see that the record exists.

    Only the operator may see records of the streams `principal/...` and `control/...`.
    """
    return role == OPERATOR or _kind_of(record) not in _OPERATORS_KINDS


def _kind_of(record: SettledRecord) -> str:
    return record.stream.partition("/")[0]


def verdict_as_json(record: SettledRecord) -> dict[str, Any]:
    """Return a record's position, stream, type, verdict, reason and log time as JSON, without its body."""
    return {
        "position": list(record.position),
        "stream": record.stream,
        "type": record.type,
        "verdict": record.verdict,
        "reason": record.reason,
        "logged_ms": record.logged_at_us // 1000,
    }


def record_as_json(record: SettledRecord, role: str) -> dict[str, Any]:
    """Return a settled record as JSON with its body, in which secrets are masked.

    For a role other than operator, `body` and `raw` are None unless the record belongs to a job or a session.
    If the body is not a JSON object, `body` is None, and `raw` is the beginning of its text. Otherwise `raw` is
    None.
    """
    found = settled_as_json(record)
    found["logged_ms"] = record.logged_at_us // 1000
    found["raw"] = None
    kind = _kind_of(record)
    if role != OPERATOR and kind not in PUBLIC_KINDS:
        found["body"] = None
    elif found["body"] is None and kind not in _OPERATORS_KINDS and record.type not in _NEVER_RAW:
        found["raw"] = (record.value or b"")[:_RAW_BYTES].decode("utf-8", "replace") or None
    return found


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


log = structlog.stdlib.get_logger(__name__)

# The number of records that are kept of each reason. All are counted.
KEPT: Final = 200
# Larger values are not kept. They are read from the ledger when a caller asks for them.
_VALUE_BYTES: Final = 8192
_LOADED: Final = 1000


class Rejections:
    """Counts of rejected records by reason, and the newest 200 records of each reason. Thread-safe.

    `settled` adds records from the start of the gateway on. `load` adds the earlier ones from the ledger.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[int, int] = {}
        self._counts: Counter[str] = Counter()
        self._newest: dict[str, list[SettledRecord]] = {}

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Count and keep the rejected records of a batch.

        The live view's thread calls this method with each batch of settled records.
        """
        with self._lock:
            for record in records:
                self._first.setdefault(record.position.partition, record.position.offset)
                if record.verdict == REJECTED:
                    self._counts[record.reason or FOLD_FAILED] += 1
                    self._keep(record)

    def load(self, settings: Settings, live_view: LiveView) -> None:
        """Add the ledger's rejected records that are older than the first record that `settled` received.

        All are counted. Only the newest 1,000 are read in full, and of each reason at most the newest 200 are
        kept. Blocks while it reads the ledger, so call it once in a thread of its own. If the ledger cannot be
        read, it logs a warning and adds nothing.
        """
        with self._lock:
            before = {**live_view.next_offsets(), **self._first}
        try:
            counts = rejected_before(settings, before)
            newest = newest_where(settings, LedgerFilter(verdict=REJECTED), _LOADED)
        except TrunklineError as error:
            log.warning("rejections_not_loaded", why=str(error))
            return
        with self._lock:
            self._counts.update(counts)
            for record in newest:
                if record.position.offset < before.get(record.position.partition, 0):
                    self._keep(record)

    def by_reason(self, role: str) -> list[dict[str, Any]]:
        """Return `reason`, `count` and `last_ms` of each reason, the most frequent reason first.

        `count` is the same for all roles. `last_ms` is the log time of the reason's newest record that this
        role may see, in milliseconds since 1970 UTC. It is None if there is no such record in memory.
        """
        with self._lock:
            return [
                {"reason": reason, "count": count, "last_ms": self._last_ms(reason, role)}
                for reason, count in self._counts.most_common()
            ]

    def newest(self, reason: str | None, role: str, limit: int) -> list[SettledRecord]:
        """Return at most `limit` rejected records that this role may see, newest first.

        `reason` is a reason such as `bad_signature`; None means all reasons. An unknown reason gives an empty
        list. A record whose value has more than 8,192 bytes has the value None.
        """
        with self._lock:
            kept = self._newest.values() if reason is None else [self._newest.get(reason, [])]
            held = sorted(chain.from_iterable(kept), key=_when, reverse=True)
        return [record for record in held if is_shown(record, role)][:limit]

    def _last_ms(self, reason: str, role: str) -> int | None:
        newest_first = reversed(self._newest.get(reason, []))
        return next((record.logged_at_us // 1000 for record in newest_first if is_shown(record, role)), None)

    def _keep(self, record: SettledRecord) -> None:
        if len(record.value or b"") > _VALUE_BYTES:
            record = msgspec.structs.replace(record, value=None)
        kept = self._newest.setdefault(record.reason or FOLD_FAILED, [])
        insort(kept, record, key=_when)
        del kept[:-KEPT]


def _when(record: SettledRecord) -> tuple[int, Position]:
    return record.logged_at_us, record.position
