"""The live table of `trunkline monitor`: open jobs, sessions, the last changes, drift."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, Final

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from connectors.cli.follow.monitor_lines import PlainLines, change_text, drift_text
from connectors.cli.shared.text_table import age_of
from connectors.gateway_client.registry_follower import RegistryFollower, RowChange
from connectors.processes.registry_drift import Drift
from connectors.terminal.terminal_text import escaped
from schemas.streams.job.job_registry import JOB_TERMINAL
from schemas.streams.session.session_registry import TERMINATED

_ROWS_MOST: Final = 15
_LAST_MOST: Final = 8
_STYLES: Final = {
    "running": "green", "completed": "green", "error": "red", "cancelled": "yellow", "stopped": "yellow",
    "terminated": "dim", "archived": "dim",
}  # fmt: skip


class LiveTable(PlainLines):
    """A table that is redrawn in place, within the context manager `live`."""

    def __init__(self) -> None:
        self.live = Live(Text("waiting for the gateway"), refresh_per_second=4)
        self._last: deque[str] = deque(maxlen=_LAST_MOST)

    def stands(self, row: RowChange) -> None:
        """Do nothing: the table shows the row."""

    def changed(self, change: RowChange) -> None:
        """Add the change to the list of the last ones."""
        self._last.append(escaped(change_text(change)))

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Add the drift to the same list."""
        self._last.append(escaped("drift    " + drift_text(drift, outcome)))

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Draw the whole table."""
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
