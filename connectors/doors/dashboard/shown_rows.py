"""Rows and records in the JSON form of the dashboard's answers. Times are milliseconds since 1970 UTC."""

from __future__ import annotations

from typing import Any, Final

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowLists, job_lists
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.settled_stream import PUBLIC_KINDS, settled_as_json
from schemas.fold.view_rows import Row
from schemas.streams.job.job_registry import JOB_REGISTERED, JOB_SECRET_ROTATED, JobRow
from schemas.streams.principal.principals import OPERATOR
from schemas.streams.task.task_registry import TaskRow
from schemas.streams.webhook.webhook_registry import WEBHOOK_SET
from trunkline_agent.wire.ids import CONTROL, PRINCIPAL

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
