"""One part of the stack in the foreground, for systemd, a container or another supervisor.

The part's log goes to standard output, one JSON object a line. Where systemd starts this program with
`Type=notify`, it learns when the part is ready, that it still answers, and how its start goes (sd_notify(3)).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any, Final

from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token
from connectors.plumbing.machine.state_file import READY
from connectors.programs.local_stack import child_process, memory
from connectors.programs.local_stack.part import NotSetUp, Part, PartFailed
from connectors.programs.local_stack.part_plan import PartPlan, group_of
from connectors.programs.local_stack.stack import StackRuns, alone_lock, check_parts, plans_of
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import Settings
from trunkline_agent.errors import UsageError
from trunkline_agent.private_files import keep_files_private
from trunkline_agent.wire.moments import iso_second

_TICK_S: Final = 0.2
# A process that the part has left may keep the pipe open.
_LAST_LINES_S: Final = 2.0
# Ten times as long as a part that is well takes from one sign of life to the next.
_WELL_FOR_S: Final = 10.0
_TELL_S: Final = 1.0
_LINE_BYTES: Final = 64 * 1024
# As `conf/log4j2.properties` writes them.
_JAVA_LINE: Final = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+ (?P<level>[A-Z]+) +(?P<logger>\S+): (?P<event>.*)")
# While a start makes progress, systemd shall go on waiting; the time is given anew each second. Kafka's storage
# is made before that, which may take minutes on a busy machine.
_MORE_TIME: Final = "EXTEND_TIMEOUT_USEC=60000000"
_TIME_TO_PREPARE: Final = "EXTEND_TIMEOUT_USEC=660000000"


class Notifier:
    """Tells systemd about this process (sd_notify(3)). Does nothing where no systemd asks for it.

    Attributes:
        has_watchdog: Whether systemd ends this process when it gives no sign of life.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environment.get("WATCHDOG_USEC", "")
        self.has_watchdog = is_ours and usec.isdigit() and int(usec) > 0

    def tell(self, *assignments: str) -> bool:
        """Send assignments such as `READY=1`; return False if there is a systemd that does not take them."""
        if not self._address:
            return True
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.settimeout(_TELL_S)
            connection.sendto("\n".join(assignments).encode(), self._address)
            return True
        return False


def as_json_line(line: str, part: str) -> str:
    """Return a line of a part's log as a JSON object, with `timestamp`, `part` and `event` at least.

    Our own programs write such objects, which stay as they are. Other lines become the field `event`; those of
    Java programs have `level` and `logger`, too.
    """
    if line.startswith("{"):
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                return line
    found: dict[str, Any] = {"timestamp": iso_second(time.time()), "part": part}
    java = _JAVA_LINE.fullmatch(line)
    found |= {"event": line} if java is None else {**java.groupdict(), "level": java["level"].lower()}
    return json.dumps(found)


def _forward(source: IO[bytes], part: str, target: IO[str]) -> None:
    """Copy the lines of a pipe until its writers have ended; one of over 64 KiB becomes several.

    An output that nobody reads any more ends nothing.
    """
    with source:
        while line := source.readline(_LINE_BYTES):
            with suppress(OSError, UnicodeError):
                print(as_json_line(line.decode(errors="replace").rstrip("\n"), part), file=target, flush=True)


@contextmanager
def _log_as_json(part: str) -> Iterator[IO[bytes]]:
    """Return an open file whose lines, and those that this process prints meanwhile, become JSON on stdout."""
    reading, writing = os.pipe()
    reader = threading.Thread(
        target=_forward, args=(os.fdopen(reading, "rb"), part, sys.stdout), name="log", daemon=True
    )
    reader.start()
    try:
        with (
            os.fdopen(writing, "wb") as output,
            os.fdopen(os.dup(writing), "w", buffering=1) as printed,
            redirect_stdout(printed),
        ):
            yield output
    finally:
        reader.join(_LAST_LINES_S)


def _plan_of(settings: Settings, name: str) -> PartPlan:
    plans = plans_of(settings, check_parts([group_of(name)]))
    for plan in plans:
        if plan.name == name:
            return plan
    raise UsageError(f"no such part: {name}; the settings want {', '.join(plan.name for plan in plans)}")


@contextmanager
def _only_here(settings: Settings, part: str) -> Iterator[None]:
    """Hold the locks of a part, and of the data directory against `up`.

    Raises:
        StackRuns: Another process runs the part, or a whole stack, with this data directory.
    """
    run = settings.data_path / "run"
    run.mkdir(parents=True, exist_ok=True)
    with (run / "stack.lock").open("a") as stack, alone_lock(settings, part).open("a") as own:
        for lock, how, what in ((stack, fcntl.LOCK_SH, "a stack"), (own, fcntl.LOCK_EX, part)):
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StackRuns(
                    f"{what} already runs with data_dir {settings.data_path}: stop it, or set another data_dir"
                ) from None
        yield


def _sign_of_life(settings: Settings, part: str) -> Path:
    """Return the file that is touched each second while a part in the foreground is well."""
    return settings.data_path / "run" / f"{part}.well"


def is_healthy(settings: Settings, name: str) -> bool:
    """Return whether a process runs this part in the foreground here, and the part is well.

    Raises:
        UsageError: There is no such part.
    """
    try:
        touched_at = _sign_of_life(settings, _plan_of(settings, name).name).stat().st_mtime
    except FileNotFoundError:
        return False
    return abs(time.time() - touched_at) < _WELL_FOR_S


def run_part(settings: Settings, name: str) -> int:
    """Run one part of the stack until a signal asks for its end (SIGTERM, SIGINT).

    Returns:
        0 after a signal. 1 if the part ended by itself, which its log says; a supervisor may start it again.

    Raises:
        UsageError: There is no such part, or the settings do not allow it.
        StackRuns: It runs already with this data directory, or `up` does.
        TrunklineError: The preparation of its start failed.
    """
    plan = _plan_of(settings, name)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    keep_files_private()
    notifier = Notifier(os.environ)
    with _only_here(settings, name):
        # An earlier process of this part may have been killed, and have left others.
        child_process.kill_marked(child_process.mark_of(settings.data_path, name))
        ensure_keyring(settings)
        ensure_operator_token(settings)
        sign_of_life = _sign_of_life(settings, name)
        sign_of_life.unlink(missing_ok=True)
        with _log_as_json(name) as output:
            part = Part(plan, settings, output)
            try:
                notifier.tell(_TIME_TO_PREPARE)
                part.launch()
                _look_after(part, notifier, sign_of_life, signals)
            except PartFailed as error:
                print(error, flush=True)
                return 1
            finally:
                sign_of_life.unlink(missing_ok=True)
                notifier.tell("STOPPING=1")
                part.stop()
    return 0


def _look_after(part: Part, notifier: Notifier, sign_of_life: Path, signals: list[int]) -> None:
    """Tell how the part is, until a signal has come. Raises PartFailed when the part has ended."""
    told_at = 0.0
    is_told = False
    while not signals:
        memory.KILLS.look()
        try:
            is_ready = part.check()
        except NotSetUp as error:
            print(error, flush=True)
            is_ready = False
        if is_ready and not is_told:
            is_told, told_at = notifier.tell("READY=1", f"STATUS={part.plan.summary}"), 0.0
        if time.monotonic() - told_at >= 1.0:
            told_at = time.monotonic()
            if not is_told:
                notifier.tell(_MORE_TIME)
            elif part.state == READY:
                sign_of_life.touch()
                if notifier.has_watchdog:
                    notifier.tell("WATCHDOG=1")
        time.sleep(_TICK_S)
