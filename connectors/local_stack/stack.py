"""The local stack: brokers, bridges, gateway, XML pump and the streaming jobs on loopback, as one thing."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from connectors.gateway.operator_token import ensure_operator_token
from connectors.launcher.local_processes import stop_all
from connectors.local_stack import child_process, log_files, state_file
from connectors.local_stack.broker_plans import accounts_dir, kafka_plan, mosquitto_plan
from connectors.local_stack.part import Part
from connectors.local_stack.part_plan import (
    ALL_PARTS,
    BRIDGE,
    FILES,
    GATEWAY,
    KAFKA,
    MOSQUITTO,
    STAGES,
    STOP_ORDER,
    STREAMS,
    XML_PUMP,
    PartPlan,
)
from connectors.local_stack.program_plans import (
    bridge_plan,
    files_plan,
    gateway_plan,
    streams_plan,
    xml_pump_plan,
)
from schemas.errors import Refused, TrunklineError, UsageError
from schemas.sealing import ensure_keyring
from schemas.settings import Settings

PLANS: dict[str, Callable[[Settings], PartPlan]] = {
    KAFKA: kafka_plan,
    MOSQUITTO: mosquitto_plan,
    BRIDGE: bridge_plan,
    FILES: files_plan,
    GATEWAY: gateway_plan,
    XML_PUMP: xml_pump_plan,
    STREAMS: streams_plan,
}
START_LIMIT_S = 180.0
_POLL_S = 0.05


class StackRuns(Refused):
    """Another process runs a stack with the same data directory."""


def check_parts(names: Iterable[str]) -> tuple[str, ...]:
    """The parts in the order of their start; raises UsageError for a name that is none."""
    wanted = set(names)
    unknown = sorted(wanted - set(ALL_PARTS))
    if unknown or not wanted:
        raise UsageError(
            f"no such part: {', '.join(unknown) or '(none named)'}; there are {', '.join(ALL_PARTS)}"
        )
    return tuple(name for name in ALL_PARTS if name in wanted)


def stack_settings(settings: Settings, parts: Iterable[str]) -> Settings:
    """The settings of the parts: when the stack runs Mosquitto, they say where its accounts are."""
    if MOSQUITTO not in parts:
        return settings
    mqtt = settings.mqtt.model_copy(update={"accounts_dir": accounts_dir(settings)})
    return settings.model_copy(update={"mqtt": mqtt})


def plans_of(settings: Settings, names: Iterable[str]) -> list[PartPlan]:
    """The plans of the parts; of the XML pump as many as the settings say."""
    plans = [PLANS[name](settings) for name in names if name != XML_PUMP]
    if XML_PUMP in names:
        plans += [xml_pump_plan(settings, number + 1) for number in range(settings.xml_pump.processes)]
    return plans


class LocalStack:
    """Runs parts of the stack as children of this process. A context manager; nothing is left after its end.

    Start it from a thread that lasts (the main one): the kernel ends the parts when the thread that started
    them ends. One stack per data directory: a second one is refused.

        with LocalStack(settings, parts=("kafka", "mosquitto")) as stack:
            stack["kafka"].kill()
            stack["kafka"].start()
    """

    def __init__(self, settings: Settings, parts: Iterable[str] = ALL_PARTS, *, detached: bool = False) -> None:
        names = check_parts(parts)
        self.settings = stack_settings(settings, names)
        self.parts = {plan.name: Part(plan, self.settings) for plan in plans_of(self.settings, names)}
        self._phase = state_file.STARTING
        self._error: str | None = None
        self._detached = detached
        self._lock: IO[str] | None = None
        self._started_at = time.time()
        self._disk = log_files.DiskTrouble()
        self._is_state_due = False

    def __getitem__(self, name: str) -> Part:
        return self.parts[name]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def run_path(self) -> Path:
        """Where state, lock and readiness files are."""
        return self.settings.data_path / "run"

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Start all parts and wait until they are ready; if one does not become so, stop them all and raise."""
        self._take_lock()
        try:
            child_process.kill_marked(child_process.mark_of(self.settings.data_path, ""))
            ensure_keyring(self.settings)
            if GATEWAY in self.parts:
                # The bridge asks the gateway for verdicts with it, and may be there first.
                ensure_operator_token(self.settings)
            self._phase, self._started_at = state_file.STARTING, time.time()
            deadline = time.monotonic() + START_LIMIT_S
            for stage in STAGES:
                self._start_stage([part for name in stage for part in self._group(name)], deadline, should_stop)
                if should_stop():
                    return
            self._phase = state_file.RUNNING
            self.write_state()
        except BaseException:
            self.stop()
            raise

    def _group(self, name: str) -> list[Part]:
        return [part for part in self.parts.values() if (part.plan.group or part.name) == name]

    def _start_stage(self, parts: list[Part], deadline: float, should_stop: Callable[[], bool]) -> None:
        for part in parts:
            self.write_state()
            part.launch()
        waiting = list(parts)
        while waiting and not should_stop():
            self.write_state()
            for part in list(waiting):
                if part.check_ready():
                    part.plan.on_first_ready()
                    waiting.remove(part)
            if waiting and time.monotonic() > deadline:
                names = ", ".join(part.name for part in waiting)
                raise TrunklineError(
                    f"not ready within {START_LIMIT_S:.0f} s: {names}; see {waiting[0].log_path}"
                )
            time.sleep(_POLL_S)

    def look_after(self) -> None:
        """Restart what has died and keep the logs bounded. To be called a few times a second. A full disk is
        told and stops nothing.
        """
        for part in self.parts.values():
            # Also what it tells goes to a log.
            with self._disk.tolerated(f"looking after {part.name}"):
                self._is_state_due = part.look_after() or self._is_state_due
        if self._is_state_due:
            self._write_state_if_possible()
        for part in self.parts.values():
            self.keep_bounded(part.log_path)

    def keep_bounded(self, path: Path) -> None:
        """Cut a log that has grown too large; a disk that does not take its copy is told, and tried later."""
        what = f"the log {path.name} cannot be kept bounded"
        if self._disk.is_due(what):
            with self._disk.tolerated(what):
                log_files.keep_bounded(path)

    def _write_state_if_possible(self) -> None:
        with self._disk.tolerated("the state file cannot be written"):
            self.write_state()
            self._is_state_due = False

    def stop(self) -> None:
        """End all parts in order, then whatever is left of them. Harmless when nothing runs."""
        if self._lock is None:
            return
        try:
            self._phase = state_file.STOPPING
            for name in STOP_ORDER:
                for part in self._group(name):
                    self._write_state_if_possible()
                    part.stop()
                if name == GATEWAY:
                    # They outlive a gateway; without a stack they have nobody to talk to.
                    stop_all(self.settings)
            child_process.kill_marked(child_process.mark_of(self.settings.data_path, ""))
            state_file.remove_state(self.settings)
        finally:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        self.run_path.mkdir(parents=True, exist_ok=True)
        lock = (self.run_path / "stack.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StackRuns(
                f"a stack runs already with data_dir {self.settings.data_path}: "
                "trunkline down, or set another data_dir"
            ) from None
        self._lock = lock

    def write_state(self) -> None:
        """Tell others how far it is."""
        state: dict[str, Any] = {
            "phase": self._phase,
            "supervisor": state_file.identity(),
            "detached": self._detached,
            "started_at": self._started_at,
            "parts": {name: part.as_json() for name, part in self.parts.items()},
        }
        state_file.write_state(self.settings, state)
