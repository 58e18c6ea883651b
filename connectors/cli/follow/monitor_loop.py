"""What `trunkline monitor` does: takes in changes, looks for drift, shows both."""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

from connectors.cli.follow.monitor_text import change_text, drift_text
from connectors.gateway_client.gateway_client import GatewayClient, reachable
from connectors.gateway_client.registry_follower import RegistryFollower, RowChange, follow_registries
from connectors.ledger_files.ledger_lines import iso_time
from connectors.processes.registry_drift import MENDED, Drift, dead_here, find_drift, mend
from connectors.processes.session_host import SessionHost
from connectors.terminal.terminal_text import escaped
from schemas.errors import NotFound, Refused, TrunklineError, UsageError
from schemas.fold.life_cycles import JOB_TERMINAL, TERMINATED
from schemas.settings.settings import Settings
from schemas.wire.ids import JOB, SESSION

_LOOK_S: Final = 0.2
_ONCE_CONFIRM_S: Final = 1.0
# A drift is told when it is still there at the second look: the reactor needs a moment, too.
_EXIT_DRIFT: Final = 1


class View(Protocol):
    """Shows what happens, in one of three forms."""

    def stands(self, row: RowChange) -> None:
        """A row as it stood at the beginning."""

    def changed(self, change: RowChange) -> None:
        """A row has changed."""

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """A drift was found; `outcome`: what was done about it."""

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Everything was looked at."""


def monitor(settings: Settings, *, once: bool, mend: bool, as_json: bool) -> int:
    """Follow until Ctrl-C, or look once. Returns the exit code. Raises TrunklineError."""
    view: View
    screen: AbstractContextManager[Any] = nullcontext()
    if as_json:
        view = JsonLines()
    elif once or not sys.stdout.isatty():
        view = PlainLines()
    else:
        from connectors.cli.follow.monitor_table import LiveTable

        view = table = LiveTable()
        screen = table.live
    with reachable(settings) as gateway, follow_registries(gateway, lost=_tell_lost) as stream, screen:
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
                _tell("events were missed; the tables are right, not every change was shown")
            for change in registries.refresh():
                view.changed(change)
            # Rows that are known to be old are no ground to mend on.
            if time.monotonic() >= next_look and registries.failure is None:
                watcher.look()
                next_look = time.monotonic() + settings.gateway.session_check_s
            view.redraw(registries, watcher.told)


def _show_standing(registries: RegistryFollower, view: View, *, ended_too: bool) -> None:
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
    """What came of a drift: whether it was mended, what to say, whether to try again while it is there."""

    is_mended: bool
    text: str | None = None
    try_again: bool = False


class DriftWatch:
    """Looks for drift; tells each once, when it was there at two looks in a row; mends it if told to. A mend
    that failed, and was not refused, is tried again at each look.
    """

    def __init__(
        self, gateway: GatewayClient, registries: RegistryFollower, host: SessionHost, view: View, *, mend: bool
    ) -> None:
        self._gateway = gateway
        self.registries = registries
        self._host = host
        self._view = view
        self._mend = mend
        self._seen: list[Drift] = []
        self._outcomes: dict[Drift, Outcome] = {}

    @property
    def told(self) -> list[Drift]:
        """What disagreed at the last two looks."""
        return list(self._outcomes)

    @property
    def unmended(self) -> list[Drift]:
        """What of it is left as it is."""
        return [drift for drift, outcome in self._outcomes.items() if not outcome.is_mended]

    def look(self) -> list[Drift]:
        """What disagrees now."""
        registries = self.registries
        found = find_drift(
            list(registries.jobs.values()),
            list(registries.sessions.values()),
            registries.job_status,
            dead_here(self._host),
        )
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
        """Ask again for the rows of what disagrees."""
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
            # Somebody has decided so, and would again: each refusal is a record.
            return Outcome(False, f"not mended: {error}")
        except TrunklineError as error:
            return Outcome(False, f"not mended yet: {error}", try_again=True)
        return Outcome(True, done)


class PlainLines:
    """One line for each change of state, each event of a job, each drift."""

    def stands(self, row: RowChange) -> None:
        """Print it."""
        self.changed(row)

    def changed(self, change: RowChange) -> None:
        """Print it."""
        print(f"{_now()}  {escaped(change_text(change))}", flush=True)

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Print it."""
        print(f"{_now()}  drift    {escaped(drift_text(drift, outcome))}", flush=True)

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Nothing: lines stay."""


class JsonLines:
    """The same as JSON, one object a line."""

    def stands(self, row: RowChange) -> None:
        """Print it."""
        self.changed(row)

    def changed(self, change: RowChange) -> None:
        """Print it."""
        before = None if change.before is None else change.before["status"]
        _print_json(kind=change.kind, name=change.name, status_before=before, by=change.by, row=change.row)

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Print it."""
        found = {"drift": drift.kind, "session": drift.session, "job_id": drift.job_id, "why": drift.why}
        _print_json(kind="drift", **found, outcome=outcome)

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Nothing: lines stay."""


def _print_json(**found: Any) -> None:
    print(json.dumps({"at": _now(), **found}, separators=(",", ":")), flush=True)


def _now() -> str:
    return iso_time(datetime.now(UTC), "milliseconds")


def _tell(text: str) -> None:
    print(f"trunkline monitor: {escaped(text)}", file=sys.stderr, flush=True)


def _tell_lost(why: str | None) -> None:
    _tell("gateway: connected again" if why is None else f"gateway: {why}; trying again")
