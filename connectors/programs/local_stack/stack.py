"""The local stack: starts, supervises and stops its parts together, on loopback."""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from connectors.hub.launcher.local_processes import stop_all
from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token
from connectors.plumbing.machine import state_file
from connectors.programs.local_stack import child_process, data_files, memory
from connectors.programs.local_stack.kafka_plan import kafka_plan, kafka_ports
from connectors.programs.local_stack.mosquitto_plan import accounts_dir, mosquitto_plan
from connectors.programs.local_stack.part import Part
from connectors.programs.local_stack.part_plan import (
    ALL_PARTS,
    BRIDGE,
    GATEWAY,
    KAFKA,
    MOSQUITTO,
    START_WITHOUT_KAFKA,
    STOP_ORDER,
    STREAMS,
    XML_PUMP,
    PartPlan,
)
from connectors.programs.local_stack.program_plans import PROGRAM_PLANS, xml_pump_plan
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import SECRET_VARIABLES, Settings, settings_environment
from trunkline_agent.errors import Refused, TrunklineError, UsageError
from trunkline_agent.private_files import keep_files_private

PLANS: dict[str, Callable[[Settings], PartPlan]] = {
    KAFKA: kafka_plan,
    MOSQUITTO: mosquitto_plan,
    **PROGRAM_PLANS,
}
# Parts of which there may be several: the plan by its number from 1, and how many the settings want.
_NUMBERED: dict[str, tuple[Callable[[Settings, int], PartPlan], Callable[[Settings], int]]] = {
    KAFKA: (kafka_plan, lambda settings: len(kafka_ports(settings))),
    XML_PUMP: (xml_pump_plan, lambda settings: settings.xml_pump.processes),
}
_POLL_S = 0.05
# Control characters, and bytes that are no UTF-8.
_IN_NO_PATH = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]").search
_IN_NO_TABLES_PATH = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\\#?\[\]^|]|%[0-9A-Fa-f]{2}").search


class StackRuns(Refused):
    """Another process runs a stack with the same data directory."""


def check_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Check names of parts of the stack. Return them in the order of their start, without duplicates.

    Raises:
        UsageError: A name is unknown, or there is none.
    """
    wanted = set(names)
    unknown = sorted(wanted - set(ALL_PARTS))
    if unknown or not wanted:
        raise UsageError(
            f"no such part: {', '.join(unknown) or '(none named)'}; there are {', '.join(ALL_PARTS)}"
        )
    return tuple(name for name in ALL_PARTS if name in wanted)


def check_addition(present: Iterable[str], missing: Iterable[str]) -> None:
    """Raise Refused if parts cannot be added to a running stack.

    Mosquitto cannot be added while bridge or gateway run, because they were started for another MQTT broker.
    All other parts can be added.

    Args:
        present: The names of the parts that run.
        missing: The names of the parts to add.
    """
    if MOSQUITTO in missing and {BRIDGE, GATEWAY} & set(present):
        raise Refused(
            "mosquitto cannot be added while bridge or gateway run: they were started for another MQTT broker. "
            "Run trunkline down, then trunkline up with all parts"
        )


def stack_settings(settings: Settings, parts: Iterable[str]) -> Settings:
    """Return the settings with which the stack starts its parts.

    If Mosquitto is among the parts, `mqtt.accounts_dir` is set to the folder of its accounts. Otherwise the
    settings are unchanged.
    """
    if MOSQUITTO not in parts:
        return settings
    mqtt = settings.mqtt.model_copy(update={"accounts_dir": accounts_dir(settings)})
    return settings.model_copy(update={"mqtt": mqtt})


def check_folders(settings: Settings, parts: Iterable[str]) -> None:
    r"""Raise UsageError for a folder of these parts' data with a character that a program cannot take.

    The library delta-rs, which reads and writes the tables, takes `\` for `/`, reads `%41` as `A`, lists no
    files below `#` or `?`, and ends at a bracket, `^` or `|`. No program takes control
    characters and bytes that are no UTF-8.
    """
    tables = settings.tables_root
    if found := _IN_NO_PATH(str(settings.data_path)):
        raise UsageError(
            f"data_dir is {str(settings.data_path)!r}: no program takes {found[0]!r} in a path. "
            "Set data_dir to another folder, or rename this one"
        )
    if "://" in tables or {GATEWAY, STREAMS}.isdisjoint(parts):
        return
    if found := _IN_NO_TABLES_PATH(tables):
        raise UsageError(
            f"the folder of the tables is {tables!r}: delta-rs cannot use a path with {found[0]!r}. Set "
            "data_dir to another folder, or storage.tables alone, or rename the folder"
        )


def plans_of(settings: Settings, names: Iterable[str]) -> list[PartPlan]:
    """Return the plans of the named parts, in the same order.

    The XML pump has a plan for each of its `xml_pump.processes`, and Kafka for each of its nodes.

    Raises:
        UsageError: The settings do not allow a part, for example because its address is not on loopback.
        TrunklineError: A program that a part needs is not installed.
    """
    check_folders(settings, names)
    plans: list[PartPlan] = []
    for name in names:
        if name in _NUMBERED:
            plan, count = _NUMBERED[name]
            plans += [plan(settings, number + 1) for number in range(count(settings))]
        else:
            plans.append(PLANS[name](settings))
    return plans


def alone_lock(settings: Settings, part: str) -> Path:
    """Return the file that a part in the foreground has locked. A stack does not use it."""
    return settings.data_path / "run" / f"{part}.alone"


def parts_alone(settings: Settings) -> list[str]:
    """Return the parts of this data directory that run in the foreground (`trunkline run`), each by itself."""
    found = []
    for path in sorted((settings.data_path / "run").glob("*.alone")):
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.stem)
    return found


def check_no_part_runs_alone(settings: Settings) -> None:
    """Raise Refused if parts of this data directory run in the foreground."""
    if found := parts_alone(settings):
        raise Refused(
            f"{', '.join(found)} with data_dir {settings.data_path} runs under another supervisor (trunkline "
            "run): stop it, or its service"
        )


def shown_settings(settings: Settings) -> dict[str, str]:
    """Return the settings that differ from the defaults as environment variables, without secrets.

    They are stored in the state file, so that `up` can compare them. `mqtt.accounts_dir` is left out, because
    the stack sets it itself.
    """
    own = settings.model_copy(update={"mqtt": settings.mqtt.model_copy(update={"accounts_dir": None})})
    return {name: value for name, value in settings_environment(own).items() if name not in SECRET_VARIABLES}


class LocalStack:
    """Parts of the stack as children of this process. A context manager, which ends all parts at its end.

    Start it from a thread that lasts, such as the main one: the kernel ends the parts when the thread that
    started them ends. A second stack for the same data directory is refused. This process and the parts have
    the umask 077 from then on.

        with LocalStack(settings, parts=("kafka", "mosquitto")) as stack:
            stack["kafka"].kill()
            stack["kafka"].start()

    Args:
        settings: The settings of all parts.
        parts: The names of the parts to run.
        detached: Whether this process is the background supervisor, which `up` and `down` may control.
    """

    def __init__(self, settings: Settings, parts: Iterable[str] = ALL_PARTS, *, detached: bool = False) -> None:
        keep_files_private()
        self._names = check_parts(parts)
        self.settings = stack_settings(settings, self._names)
        self.parts = self._made(self._names)
        self._phase = state_file.STARTING
        self._detached = detached
        self._lock: IO[str] | None = None
        self._started_at = time.time()
        self._disk = data_files.DiskTrouble()
        self._is_state_due = False

    def _made(self, names: Iterable[str]) -> dict[str, Part]:
        return {plan.name: Part(plan, self.settings) for plan in plans_of(self.settings, names)}

    def __getitem__(self, name: str) -> Part:
        return self.parts[name]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Start all parts and wait until they are ready. There is no limit of time.

        Args:
            should_stop: Called repeatedly. When it returns True, the wait ends, and the parts go on running.

        Raises:
            StackRuns: Another process runs a stack with this data directory.
            PartFailed: A part has failed. All parts were stopped.
            TrunklineError: The preparation of a part has failed. All parts were stopped.
        """
        self.begin()
        try:
            while not should_stop():
                self.look_after()
                for part in self.parts.values():
                    if part.error is not None:
                        raise part.error
                if all(part.is_ready for part in self.parts.values()):
                    return
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise

    def begin(self) -> None:
        """Lock the data directory and mark all parts to be started. Calls of `look_after` then start them.

        For a caller that does not wait until the parts are ready. A `with` block and `start` wait.

        Processes that an earlier, killed stack has left are killed.

        Raises:
            StackRuns: Another process runs a stack with this data directory.
        """
        self._take_lock()
        try:
            self._phase, self._started_at = state_file.STARTING, time.time()
            self.write_state()
            child_process.kill_marked(child_process.mark_of(self.settings.data_path, ""))
            ensure_keyring(self.settings)
            self._schedule(self.parts)
        except BaseException:
            self.stop()
            raise

    def add(self, names: Iterable[str]) -> None:
        """Add the named parts that the stack lacks; others are ignored. Calls of `look_after` then start them.

        Raises:
            UsageError: a name is unknown.
            Refused: Mosquitto is added to parts that were started for another MQTT broker.
        """
        wanted = check_parts({*self._names, *names})
        missing = [name for name in wanted if name not in self._names]
        check_addition(self._names, missing)
        self.settings = stack_settings(self.settings, wanted)
        added = self._made(missing)
        self._names, self.parts = wanted, self.parts | added
        self._schedule(added)

    def _schedule(self, parts: dict[str, Part]) -> None:
        if GATEWAY in parts:
            # The bridge reads verdicts from the gateway with this token, and may start first.
            ensure_operator_token(self.settings)
        for part in parts.values():
            part.schedule()
        self._phase = state_file.STARTING
        self._is_state_due = True

    def _waits_for(self, part: Part) -> str | None:
        """Return the part that must be ready before this one is started, or None. Any node of Kafka will do."""
        nodes = [one for one in self.parts.values() if one.group == KAFKA]
        if not nodes or any(one.is_ready for one in nodes) or part.group in START_WITHOUT_KAFKA:
            return None
        return KAFKA if part.state == state_file.WAITING else None

    def look_after(self) -> None:
        """Start the parts that are due or have ended, write the state file, and limit the size of the logs.

        Call it a few times a second. A failed part or a full disk is printed to stdout, raises nothing, and
        does not affect other parts.
        """
        memory.KILLS.look()
        for part in self.parts.values():
            # It prints to a log, which may fail, too.
            with self._disk.tolerated(f"looking after {part.name}"):
                try:
                    self._is_state_due |= part.look_after(may_start=self._waits_for(part) is None)
                except TrunklineError as error:
                    print(f"{part.name}: {error}", flush=True)
                    self._is_state_due = True
        if self._is_state_due:
            self._write_state_if_possible()
        for part in self.parts.values():
            self.keep_bounded(part.log_path)

    def keep_bounded(self, path: Path) -> None:
        """Empty the log file `path` if it is larger than 16 MiB, after copying it to `<name>.1`.

        A failure of the disk is printed, and a later call tries again.
        """
        what = f"the log {path.name} cannot be kept bounded"
        if self._disk.is_due(what):
            with self._disk.tolerated(what):
                data_files.keep_bounded(path)

    def _write_state_if_possible(self) -> None:
        with self._disk.tolerated("the state file cannot be written"):
            self.write_state()
            self._is_state_due = False

    def stop(self) -> None:
        """End all parts in order, kill what is left of them, and release the data directory.

        Launched agents are ended, too. The call does nothing if the stack does not run.
        """
        if self._lock is None:
            return
        try:
            self._phase = state_file.STOPPING
            for name in STOP_ORDER:
                self._write_state_if_possible()
                # At once: the last node of Kafka would wait for the others, which it asks whether it may end.
                with ThreadPoolExecutor() as pool:
                    list(pool.map(Part.stop, [one for one in self.parts.values() if one.group == name]))
                if name == GATEWAY:
                    # Agents outlive a gateway, but without a stack they have no server.
                    stop_all(self.settings)
            child_process.kill_marked(child_process.mark_of(self.settings.data_path, ""))
            state_file.remove_state(self.settings)
        finally:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        run = self.settings.data_path / "run"
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / "stack.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StackRuns(
                f"a stack or a part of one already runs with data_dir {self.settings.data_path}: run trunkline "
                "down, or stop its services, or set another data_dir"
            ) from None
        self._lock = lock

    def write_state(self) -> None:
        """Write the state of the stack and its parts to the state file, for `up`, `status` and `down`.

        Raises:
            OSError: The disk has no room.
        """
        parts = {
            name: {**part.as_json(), "waits_for": self._waits_for(part)} for name, part in self.parts.items()
        }
        if self._phase == state_file.STARTING and all(state_file.is_settled(parts, name) for name in parts):
            self._phase = state_file.RUNNING
        state: dict[str, Any] = {
            "phase": self._phase,
            "supervisor": state_file.identity(),
            "detached": self._detached,
            "started_at": self._started_at,
            "names": list(self._names),
            "settings": shown_settings(self.settings),
            "parts": parts,
        }
        state_file.write_state(self.settings, state)
