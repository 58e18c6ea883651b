"""Rows and records in the JSON form of the dashboard's answers. Times are milliseconds since 1970 UTC."""

from __future__ import annotations

from typing import Any, Final

from connectors.hub.lists.row_lists import RowLists, job_lists
from connectors.hub.lists.settled_stream import PUBLIC_KINDS, settled_as_json
from connectors.hub.live.live_view import LiveView
from connectors.hub.live.settled_feed import SettledRecord
from schemas.streams.job.job_registry import (
    JOB_REGISTERED,
    JOB_SECRET_ROTATED,
    REGISTRY_JOBS,
    JobRow,
)
from schemas.streams.principal.principals import OPERATOR
from schemas.streams.task.task_registry import REGISTRY_TASKS, TaskRow
from schemas.streams.webhook.webhook_registry import WEBHOOK_SET
from trunkline_agent.wire.ids import CONTROL, PRINCIPAL

_TEXT: Final = 300
_RAW_BYTES: Final = 4096
# Only the operator may see principals and the records about the topic.
_OPERATORS_KINDS: Final = frozenset({PRINCIPAL, CONTROL})


def milliseconds(moment: int | None) -> int | None:
    """Convert a time in microseconds since 1970 UTC to milliseconds. None, for an unknown time, stays None."""
    return None if moment is None else moment // 1000


def shortened(text: str | None) -> str | None:
    """Return a text cut to 300 characters, with `…` as the last one if it was longer. None stays None."""
    return text if text is None or len(text) <= _TEXT else text[: _TEXT - 1] + "…"


def job_as_json(live_view: LiveView, row: JobRow) -> dict[str, Any]:
    """Return the row of a job as JSON for the dashboard, with texts cut to 300 characters.

    `offset` is the log offset of the record that made the row. Of two JSON versions of one job, the one with
    the higher `offset` is newer.
    """
    return {
        "job_id": row.job_id,
        "status": row.status,
        "description": shortened(row.description),
        "session": row.session or row.session_wanted,
        "registered_by": row.registered_by,
        **_moments(row, "registered", "picked", "started", "ended"),
        "last_event": row.last_event,
        "last_detail": shortened(row.last_detail),
        "last_seq": row.last_seq,
        "events": row.events,
        "offset": live_view.row_offset(REGISTRY_JOBS, row.job_id),
    }


def task_as_json(live_view: LiveView, row: TaskRow) -> dict[str, Any]:
    """Return the row of a task as JSON for the dashboard, with texts cut to 300 characters.

    `offset` is the log offset of the record that made the row. Of two JSON versions of one task, the one with
    the higher `offset` is newer.
    """
    return {
        "task_id": row.task_id,
        "status": row.status,
        "description": shortened(row.description),
        "agent": row.agent_name,
        "error": shortened(row.error),
        **_moments(row, "submitted", "started", "ended"),
        "offset": live_view.row_offset(REGISTRY_TASKS, row.task_id),
    }


def _moments(row: JobRow | TaskRow, *names: str) -> dict[str, int | None]:
    return {f"{name}_ms": milliseconds(getattr(row, f"{name}_at")) for name in names}


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
    return role == OPERATOR or kind_of(record) not in _OPERATORS_KINDS


def kind_of(record: SettledRecord) -> str:
    """Return the kind of a record's stream, such as `job` for the stream `job/0a1b2c3d`."""
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
    if role != OPERATOR and kind_of(record) not in PUBLIC_KINDS:
        found["body"] = None
    elif found["body"] is None and record.value and _may_be_raw(record):
        found["raw"] = record.value[:_RAW_BYTES].decode("utf-8", "replace")
    return found


def _may_be_raw(record: SettledRecord) -> bool:
    # The bodies of these records hold hashes and sealed secrets, which can be removed only from a JSON object.
    return kind_of(record) not in _OPERATORS_KINDS and record.type not in (
        JOB_REGISTERED,
        JOB_SECRET_ROTATED,
        WEBHOOK_SET,
    )
