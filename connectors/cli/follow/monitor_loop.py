"""The loop of `trunkline monitor` and its output.

It shows changes of jobs and sessions, and finds, shows and repairs contradictions (drift).
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from connectors.cli.shared.text_output import Notes, age_of
from connectors.log.ledger_files.ledger_export import iso_time
from connectors.plumbing.gateway_client.event_stream import RegistryFollower, RowChange, follow_registries
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, reachable
from connectors.programs.processes.session_host import SessionHost
from connectors.programs.processes.session_registry_client import MENDED, Drift, dead_here, find_drift, mend
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_TERMINAL
from schemas.streams.session.sessions import TERMINATED
from trunkline_agent.errors import NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import JOB, SESSION

_ROWS_MOST: Final = 15
_LAST_MOST: Final = 8
_STYLES: Final = {
    "running": "green", "completed": "green", "error": "red", "cancelled": "yellow", "stopped": "yellow",
    "terminated": "dim", "archived": "dim",
}  # fmt: skip


def _change_text(change: RowChange) -> str:
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


def _drift_text(drift: Drift, outcome: str | None = None) -> str:
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
        print(f"{_now()}  {escaped(_change_text(change))}", flush=True)

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Print a drift: rows of a job and a session that contradict each other.

        `outcome` is the text about the repair of the drift; None if no repair was tried.
        """
        print(f"{_now()}  drift    {escaped(_drift_text(drift, outcome))}", flush=True)

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Draw the current state of all rows anew, for output that is a table. Here it does nothing.

        The loop of the command calls this several times a second.
        """


class _JsonLines(PlainLines):
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


class _LiveTable(PlainLines):
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
        self._last.append(escaped(_change_text(change)))

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Add a line about the drift to the list of the last changes below the table."""
        self._last.append(escaped("drift    " + _drift_text(drift, outcome)))

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Draw the table of jobs and sessions, with the drifts and the last changes below it, anew.

        `registries` has the current rows, and `drifts` the contradictions to show.
        """
        parts: list[Any] = [_jobs(registries), _sessions(registries)]
        parts += [Text(escaped("drift: " + _drift_text(drift)), style="bold red") for drift in drifts]
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


_LOOK_S: Final = 0.2
_ONCE_CONFIRM_S: Final = 1.0
_EXIT_DRIFT: Final = 1
_NOTES: Final = Notes("monitor")


def monitor(settings: Settings, *, once: bool, mend: bool, as_json: bool) -> int:
    """Show changes of jobs and sessions, and their contradictions (drift), until Ctrl-C or once.

    A lost connection to the gateway is made again, with a note on stderr.

    Args:
        settings: The settings, which name the gateway.
        once: Whether to show the current state alone and return. Otherwise the function never returns, and
            Ctrl-C raises KeyboardInterrupt.
        mend: Whether to repair drift that can be repaired.
        as_json: Whether to print JSON instead of text.

    Returns:
        With `once`, 1 if there is drift that was not repaired, else 0.

    Raises:
        TrunklineError: At the start, the gateway does not answer or refuses the token.
    """
    view = _JsonLines() if as_json else PlainLines()
    screen: AbstractContextManager[Any] = nullcontext()
    if not (as_json or once) and sys.stdout.isatty():
        view = table = _LiveTable()
        screen = table.live
    with (
        reachable(settings) as gateway,
        follow_registries(gateway, lost=_NOTES.lost("gateway")) as stream,
        screen,
    ):
        registries = RegistryFollower(gateway)
        registries.take(stream.first(settings.gateway.settle_timeout_s))
        watcher = DriftWatch(gateway, registries, SessionHost(settings), view, mend=mend)
        _show_standing(registries, view, ended_too=once)
        if once:
            return _look_once(watcher)
        next_look = 0.0
        while True:
            event = stream.next(_LOOK_S)
            while event is not None:
                registries.take(event)
                event = stream.next(0.0)
            if registries.missed:
                registries.missed = False
                _NOTES.say("events were missed; the tables are right, not every change was shown")
            for change in registries.refresh():
                view.changed(change)
            # Without current rows, a repair could be wrong.
            if time.monotonic() >= next_look and registries.failure is None:
                watcher.look()
                next_look = time.monotonic() + settings.gateway.session_check_s
            view.redraw(registries, watcher.drifts)


def _show_standing(registries: RegistryFollower, view: PlainLines, *, ended_too: bool) -> None:
    for row in sorted(registries.jobs.values(), key=lambda row: str(row["registered_at"])):
        if ended_too or row["status"] not in JOB_TERMINAL:
            view.stands(RowChange(JOB, row["job_id"], None, row, None))
    for row in sorted(registries.sessions.values(), key=lambda row: str(row["created_at"])):
        if ended_too or row["status"] != TERMINATED:
            view.stands(RowChange(SESSION, row["session"], None, row, None))


def _look_once(watcher: DriftWatch) -> int:
    if watcher.look():
        time.sleep(_ONCE_CONFIRM_S)
        watcher.reload()
        watcher.look()
    if watcher.registries.failure is not None:
        raise watcher.registries.failure
    return _EXIT_DRIFT if watcher.unmended else 0


class Outcome(NamedTuple):
    """The result of the repair of a drift.

    Attributes:
        is_mended: Whether it was repaired.
        text: A text about the repair or its failure; None if no repair was tried.
        try_again: Whether to try the repair again while the drift lasts.
    """

    is_mended: bool
    text: str | None = None
    try_again: bool = False


class DriftWatch:
    """A search for drift, that is, for rows of jobs and sessions that contradict each other, and its repair.

    A drift is shown once, when two calls of `look` in a row find it, because the reactor may repair it in
    between. A repair that failed and was not refused is tried again at each `look`. Not thread-safe.

    Args:
        gateway: The client that carries out repairs.
        rows: The current rows of jobs and sessions.
        host: The sessions' processes on this machine.
        view: The output.
        mend: Whether to repair drift.
    """

    def __init__(
        self, gateway: GatewayClient, rows: RegistryFollower, host: SessionHost, view: PlainLines, *, mend: bool
    ) -> None:
        self._gateway = gateway
        self.registries = rows
        self._host = host
        self._view = view
        self._mend = mend
        self._seen: list[Drift] = []
        self._outcomes: dict[Drift, Outcome] = {}

    @property
    def drifts(self) -> list[Drift]:
        """The drifts that both of the last two calls of `look` found, repaired or not."""
        return list(self._outcomes)

    @property
    def unmended(self) -> list[Drift]:
        """The drifts that both of the last two calls of `look` found and that were not repaired."""
        return [drift for drift, outcome in self._outcomes.items() if not outcome.is_mended]

    def look(self) -> list[Drift]:
        """Find all drifts in the current rows, and return them; also those that are repaired in this call.

        A drift that the last call found too is printed, unless it was printed before. With `mend` it is
        repaired then. A repair that fails raises nothing: it is printed, and `unmended` has the drift.
        """
        rows = self.registries
        jobs, sessions = list(rows.jobs.values()), list(rows.sessions.values())
        found = find_drift(jobs, sessions, rows.job_status, dead_here(self._host))
        outcomes: dict[Drift, Outcome] = {}
        for drift in found:
            if drift not in self._seen:
                continue
            before = self._outcomes.get(drift)
            outcome = self._mended(drift) if before is None or before.try_again else before
            if before is None or outcome.text != before.text:
                self._view.drifted(drift, outcome.text)
            outcomes[drift] = outcome
        self._seen, self._outcomes = found, outcomes
        return found

    def reload(self) -> None:
        """Request the rows of the drifts that the last `look` found from the gateway again.

        If the gateway does not answer, the old rows stay, and `registries.failure` has the error.
        """
        self.registries.touch(
            {drift.session for drift in self._seen}, {d.job_id for d in self._seen if d.job_id}
        )
        self.registries.refresh()

    def _mended(self, drift: Drift) -> Outcome:
        if not self._mend or drift.kind not in MENDED:
            return Outcome(False)
        try:
            done = mend(self._gateway, self._host, drift, self.registries.sessions.get(drift.session))
        except (Refused, NotFound, UsageError) as error:
            # A further try would be refused, too, and each refusal is a record in the log.
            return Outcome(False, f"not mended: {error}")
        except TrunklineError as error:
            return Outcome(False, f"not mended yet: {error}", try_again=True)
        return Outcome(True, done)
