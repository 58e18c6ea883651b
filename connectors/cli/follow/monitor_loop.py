"""The loop of `trunkline monitor`: it shows changes, and finds, shows and repairs contradictions (drift)."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

from connectors.cli.follow.monitor_views import JsonLines, LiveTable, PlainLines
from connectors.cli.shared.notes import Notes
from connectors.plumbing.gateway_client.event_stream import RegistryFollower, RowChange, follow_registries
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, reachable
from connectors.programs.processes.session_host import SessionHost
from connectors.programs.processes.session_registry_client import MENDED, Drift, dead_here, find_drift, mend
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_TERMINAL
from schemas.streams.session.sessions import TERMINATED
from trunkline_agent.errors import NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.wire.ids import JOB, SESSION

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
    view = JsonLines() if as_json else PlainLines()
    screen: AbstractContextManager[Any] = nullcontext()
    if not (as_json or once) and sys.stdout.isatty():
        view = table = LiveTable()
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
