"""The output of `trunkline monitor` about changes of jobs and sessions, and contradictions (drift)."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from connectors.cli.shared.text_table import age_of
from connectors.log.ledger_files.ledger_lines import iso_time
from connectors.plumbing.gateway_client.event_stream import RegistryFollower, RowChange
from connectors.programs.processes.session_registry_client import Drift
from schemas.streams.job.job_registry import JOB_TERMINAL
from schemas.streams.session.sessions import TERMINATED
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import JOB

_ROWS_MOST: Final = 15
_LAST_MOST: Final = 8
_STYLES: Final = {
    "running": "green", "completed": "green", "error": "red", "cancelled": "yellow", "stopped": "yellow",
    "terminated": "dim", "archived": "dim",
}  # fmt: skip


def change_text(change: RowChange) -> str:
    """Return one line of text about a changed row of a job or session.

    The text may have control characters that an agent wrote, so the caller must escape it with `escaped`.
    """
    row, before = change.row, change.before
    status = row["status"]
    if before is not None and before["status"] != status:
        status = f"{before['status']} -> {status}"
    if change.kind == JOB:
        parts = [f"job      {change.name}  {status}"]
        if row["session"]:
            parts.append(f"in session {row['session']}")
        if row["last_event"] and row["status"] not in JOB_TERMINAL | {"pending"}:
            parts.append(f"{row['last_seq']} {row['last_event']}: {row['last_detail']}")
        elif row["last_detail"]:
            parts.append(row["last_detail"])
    else:
        parts = [f"session  {change.name}  {status}"]
        if row["job_id"]:
            parts.append(f"has job {row['job_id']}")
        if row["reason"]:
            parts.append(row["reason"])
        if row["status"] == TERMINATED and before is not None and (change.by or "").startswith("reactor/"):
            parts.append("closed by the reactor")
    return "  ".join(parts)


def drift_text(drift: Drift, outcome: str | None = None) -> str:
    """Return one line of text about a drift: rows of a job and a session that contradict each other.

    `outcome` is the text about the repair of the drift; None if no repair was tried. The caller must escape the
    line with `escaped`, because an agent may have written a part of it.
    """
    job = "" if drift.job_id is None else f", job {drift.job_id}"
    return f"session {drift.session}{job}: {drift.why}" + ("" if outcome is None else f"; {outcome}")


class PlainLines:
    """The output of `trunkline monitor` as text: a line for each change of a row and each drift.

    A drift is a contradiction between the rows of a job and a session. Other forms of output are subclasses.
    """

    def stands(self, row: RowChange) -> None:
        """Print a row that exists when the command starts. `row` has the row, without a previous one."""
        self.changed(row)

    def changed(self, change: RowChange) -> None:
        """Print that a row of a job or session has changed."""
        print(f"{_now()}  {escaped(change_text(change))}", flush=True)

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Print a drift: rows of a job and a session that contradict each other.

        `outcome` is the text about the repair of the drift; None if no repair was tried.
        """
        print(f"{_now()}  drift    {escaped(drift_text(drift, outcome))}", flush=True)

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Draw the current state of all rows anew, for output that is a table. Here it does nothing.

        The loop of the command calls this several times a second.
        """


class JsonLines(PlainLines):
    """The output of `trunkline monitor` as JSON: an object on a line for each change and each drift."""

    def changed(self, change: RowChange) -> None:
        """Print the change of a row as JSON."""
        before = None if change.before is None else change.before["status"]
        _print_json(kind=change.kind, name=change.name, status_before=before, by=change.by, row=change.row)

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Print a drift as JSON, with the text about its repair or null."""
        found = {"drift": drift.kind, "session": drift.session, "job_id": drift.job_id, "why": drift.why}
        _print_json(kind="drift", **found, outcome=outcome)


def _print_json(**found: Any) -> None:
    print(json.dumps({"at": _now(), **found}, separators=(",", ":")), flush=True)


def _now() -> str:
    return iso_time(datetime.now(UTC), "milliseconds")


class LiveTable(PlainLines):
    """The output of `trunkline monitor` on a terminal: a table of jobs and sessions, redrawn in place.

    Use its attribute `live`, a context manager, while the table is shown.
    """

    def __init__(self) -> None:
        self.live = Live(Text("waiting for the gateway"), refresh_per_second=4)
        self._last: deque[str] = deque(maxlen=_LAST_MOST)

    def stands(self, row: RowChange) -> None:
        """Do nothing, because the table shows each existing row anyway."""

    def changed(self, change: RowChange) -> None:
        """Add a line about the change to the list of the last changes below the table."""
        self._last.append(escaped(change_text(change)))

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Add a line about the drift to the list of the last changes below the table."""
        self._last.append(escaped("drift    " + drift_text(drift, outcome)))

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Draw the table of jobs and sessions, with the drifts and the last changes below it, anew.

        `registries` has the current rows, and `drifts` the contradictions to show.
        """
        parts: list[Any] = [_jobs(registries), _sessions(registries)]
        parts += [Text(escaped("drift: " + drift_text(drift)), style="bold red") for drift in drifts]
        parts += [Text(line, style="dim") for line in self._last]
        self.live.update(Group(*parts))


def _jobs(registries: RegistryFollower) -> Table:
    rows = _sorted(registries.jobs.values(), JOB_TERMINAL, "registered_at")
    table = _table(f"Jobs ({len(rows)})", "job", "state", "age", "session", "seq", "detail")
    for row in rows[:_ROWS_MOST]:
        detail = row["last_detail"] or row["description"]
        session = row["session"] or row["session_wanted"]
        _add(table, row, row["job_id"], row["registered_at"], session, row["last_seq"], detail)
    return table


def _sessions(registries: RegistryFollower) -> Table:
    rows = _sorted(registries.sessions.values(), {TERMINATED}, "created_at")
    table = _table(f"Sessions ({len(rows)})", "session", "state", "age", "job", "host", "reason")
    for row in rows[:_ROWS_MOST]:
        job = row["job_id"] or row["for_job"]
        _add(table, row, row["session"], row["created_at"], job, row["host"], row["reason"])
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    return table


def _add(table: Table, row: dict[str, Any], name: str, since: str, *more: object) -> None:
    cells = [Text(escaped(name)), Text(row["status"], style=_STYLES.get(row["status"], ""))]
    cells.append(Text(age_of(since)))
    # Text and not markup, because agents wrote it.
    cells += [Text("-" if value is None else escaped(str(value))) for value in more]
    table.add_row(*cells)


def _sorted(rows: Iterable[dict[str, Any]], ended: Collection[str], since: str) -> list[dict[str, Any]]:
    """Return the rows with the newest first, and those whose state is in `ended` after all others."""
    newest_first = sorted(rows, key=lambda row: str(row[since]), reverse=True)
    return sorted(newest_first, key=lambda row: row["status"] in ended)
