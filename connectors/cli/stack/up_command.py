"""Start the local stack in the background, and wait until it is ready.

Kafka, Mosquitto, the bridges of MQTT and of the file queue, the gateway (HTTP), the XML pump and the streaming
jobs run on loopback, supervised: a part that dies is started again. All their data is below `data_dir`.
Running it twice is harmless; with `--only` it adds parts to a stack that runs. `--profile durable` runs three
nodes of Kafka instead of one, so that one may be lost with its disk.

The command waits as long as the start makes progress. Exit code 1 when a part is not ready: the other parts go
on running, and the supervisor goes on trying to start it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from connectors.cli.shared.actions import argument
from connectors.cli.shared.call import Call
from connectors.cli.stack.profiles import PROFILES, take_over
from connectors.programs.local_stack import control, memory
from connectors.programs.local_stack.data_files import describe_repair, find_open, last_lines
from connectors.programs.local_stack.part_plan import ALL_PARTS, GATEWAY, KAFKA, STREAMS
from connectors.programs.local_stack.stack import check_folders, check_parts, plans_of
from schemas.settings.settings import Settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import duration_s

_SHOW_EVERY_S = 10.0
_LINE_CHARACTERS = 100


ONLY = argument(
    "--only",
    f"some of: {','.join(ALL_PARTS)} (default: all)",
    metavar="PARTS",
    default=",".join(ALL_PARTS),
)
ARGUMENTS = (
    ONLY,
    argument(
        "--profile",
        f"first write the settings of a profile to the settings file; there is {', '.join(PROFILES)}",
        metavar="NAME",
    ),
    argument(
        "--timeout",
        "how long to wait at most for parts that still make progress, e.g. 90s or 10m (default: 30m)",
        metavar="TIME",
        type=duration_s,
        default=control.UP_LIMIT_S,
    ),
)


class Progress:
    """The display of a starting stack on standard error, called with each new state of the stack.

    It prints a line when a part becomes ready or fails, and in between the last log lines of the other parts.
    """

    def __init__(self) -> None:
        self._started = self._shown_at = time.monotonic()
        self._shown: set[str] = set()
        self._failures: dict[str, int] = {}
        self._live = sys.stderr.isatty()

    def __call__(self, state: dict[str, Any]) -> None:
        """Print the changes between the last state and `state`, the state of the stack as JSON."""
        waiting: dict[str, dict[str, Any]] = {}
        for name, part in state["parts"].items():
            if part["state"] != "ready":
                waiting[name] = part
                self._show_failure(name, part)
            elif name not in self._shown:
                self._shown.add(name)
                self._clear()
                seconds = part["ready_after_s"] or 0.0
                print(f"  {part['summary']:<34} ready after {seconds:4.1f} s", file=sys.stderr)
        if waiting and self._live:
            text = f"  waiting for {', '.join(waiting)} ({time.monotonic() - self._started:.0f} s)"
            print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)
        elif waiting and time.monotonic() - self._shown_at >= _SHOW_EVERY_S:
            self._show_waiting(waiting)

    def _show_failure(self, name: str, part: dict[str, Any]) -> None:
        if part["failures"] > self._failures.get(name, 0):
            self._clear()
            print(f"  {name} {part['failure']}; it is tried again", file=sys.stderr)
        self._failures[name] = part["failures"]

    def _show_waiting(self, waiting: dict[str, dict[str, Any]]) -> None:
        self._shown_at = time.monotonic()
        print(f"  after {self._shown_at - self._started:.0f} s not ready yet:", file=sys.stderr)
        for name, part in waiting.items():
            last = [] if part["waits_for"] else last_lines(Path(part["log"]), 1)
            doing = escaped(last[0])[:_LINE_CHARACTERS] if last else control.part_reason(part)
            print(f"    {name}: {doing}", file=sys.stderr)

    def _clear(self) -> None:
        if self._live:
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr)


def _warn_of_organism(settings: Settings) -> None:
    from connectors.hub.organism.organism_file import OrganismError, check_organism_names

    try:
        check_organism_names(settings)
    except OrganismError as error:
        print(f"The XML pump's listeners are not loaded: {escaped(str(error))}", file=sys.stderr)


def _close_to_others(settings: Settings) -> None:
    """Make files private that earlier versions left open to other users, and report it."""
    try:
        closed = find_open(settings.data_path, close=True)
    except OSError as error:
        raise TrunklineError(
            f"{error.filename or settings.data_path} cannot be made private: {error.strerror}; "
            "the data directory and all in it must belong to the user who starts the stack"
        ) from error
    for line in describe_repair(settings.data_path, closed):
        print(line, file=sys.stderr)


def run(call: Call) -> int:
    """Start the local stack in the background, or missing parts of a running one, and wait until it is ready.

    Returns 0. Raises TrunklineError if a part is not ready in time; the other parts go on running. Raises
    Refused if the ledger has another fold version; then nothing is started.
    """
    from schemas.tables.fold_version import check_fold_version

    settings = call.settings
    parts = [name.strip() for name in call.only.split(",") if name.strip()]
    if call.profile:
        settings = take_over(
            call.profile, settings, lambda wanted: plans_of(wanted, check_parts([*parts, KAFKA]))
        )
    check_folders(settings, parts)
    before = control.running_state(settings)
    started = time.monotonic()
    if {GATEWAY, STREAMS} & set(parts):
        # They would refuse the ledger, too, but the supervisor would start them again and again.
        check_fold_version(settings)
    _close_to_others(settings)
    if GATEWAY in parts:
        _warn_of_organism(settings)
    if before is None:
        if lacking := memory.shortage(plan.name for plan in plans_of(settings, check_parts(parts))):
            print(f"Little memory: {lacking}. Parts may be killed; see {memory.PAGE}", file=sys.stderr)
        print(f"Starting; data and logs are in {settings.data_path}", file=sys.stderr)
    runs = before is not None and before["phase"] == "running" and set(parts) <= set(before["names"])
    progress = (lambda _state: None) if runs else Progress()
    state = control.start_detached(settings, parts, progress, call.timeout)
    if runs:
        print(f"It runs already (data in {settings.data_path}). See: trunkline status")
        if differing := control.differing_settings(state, settings):
            changed = f"with other values of {', '.join(differing)}"
            print(f"It runs {changed}; for yours: trunkline down, then trunkline up", file=sys.stderr)
    else:
        print(f"Ready after {time.monotonic() - started:.1f} s. Stop it with: trunkline down")
    return 0
