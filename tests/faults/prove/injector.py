"""Does to the backbone what the schedule says, when it says so, and notes what was really done."""

from __future__ import annotations

import heapq
import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from schemas.errors import Refused
from tests.faults.prove.brokers import Brokers
from tests.faults.prove.crash_points import arm, disarm, fired
from tests.faults.prove.load_messages import send_on_full_disk
from tests.faults.prove.oracle import Oracle
from tests.faults.prove.schedule import (
    CRASH,
    CUT,
    FULL_DISK,
    KILL,
    MUTE,
    SECOND,
    SLOW,
    STOP,
    STREAMS,
    Injection,
    Schedule,
)
from tests.faults.prove.seed_parts import Second, SeedParts
from tests.faults.prove.tcp_proxy import PASS, TcpProxy

_BROKERS: Final = ("kafka", "mosquitto")
_LIMIT_TICK_S: Final = 0.5
_REFUSED: Final = Refused.exit_code


class Injector:
    """For one thread. `tick` it often; `over` says when the last fault is."""

    def __init__(self, parts: SeedParts, brokers: Brokers, oracle: Oracle, schedule: Schedule) -> None:
        self._parts, self._brokers, self._oracle, self._schedule = parts, brokers, oracle, schedule
        self._points = parts.folder / "points"
        self._began = time.monotonic()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._armed: list[str] = []
        self._full: set[str] = set()
        self._limited_at = 0.0
        self.done: Counter[str] = Counter()
        self.misbehaved: list[str] = []
        self._threads: list[threading.Thread] = []
        for injection in schedule.injections:
            self._at(injection.at_s, lambda injection=injection: self._begin(injection))

    def _at(self, at_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what))

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        self._at(time.monotonic() - self._began + after_s, what)

    @property
    def over(self) -> bool:
        """Whether nothing more is to be done or undone."""
        return not self._events

    def tick(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        while self._events and self._events[0][0] <= now - self._began:
            _, _, what = heapq.heappop(self._events)
            what()
        if self._full and now - self._limited_at > _LIMIT_TICK_S:
            # What has been started since has a full disk as well.
            self._limited_at = now
            for name in self._full:
                self._parts.limit_files(name, is_full=True)

    def heal(self) -> None:
        """End all that lasts. Points of the streaming jobs stay armed: they come there late."""
        self._events.clear()
        self._full.clear()
        disarm(self._points, but=STREAMS)
        self._brokers.heal()
        self._parts.heal()
        for thread in self._threads:
            thread.join(30)

    def died(self) -> Counter[str]:
        """The deaths at named points. Nobody dies there from now on."""
        disarm(self._points)
        return Counter({fault: fired(self._points, fault.partition(":")[2]) for fault in self._armed})

    def _begin(self, injection: Injection) -> None:
        kind, target = injection.kind, injection.target
        if kind == CRASH:
            self._armed.append(injection.fault)
            arm(self._points, target, injection.nth)
            return
        self.done[injection.fault] += 1
        if kind == KILL:
            if target in _BROKERS:
                self._brokers.kill(target)
            else:
                self._parts.parts[target].kill()
        elif kind == STOP:
            self._signal(target, signal.SIGSTOP)
            self._later(injection.for_s, lambda: self._signal(target, signal.SIGCONT))
        elif kind in (CUT, SLOW, MUTE):
            self._bend(target, kind)
            self._later(injection.for_s, lambda: self._bend(target, PASS))
        elif kind == FULL_DISK:
            self._fill(injection)
        elif kind == SECOND:
            self._start_second(target)

    def _signal(self, target: str, number: signal.Signals) -> None:
        if target in _BROKERS:
            self._brokers.signal(target, number)
        else:
            self._parts.signal(target, number)

    def _bend(self, target: str, mode: str) -> None:
        proxies: Sequence[TcpProxy] = (
            [self._brokers.proxies[target]] if target in _BROKERS else self._parts.proxies
        )
        for proxy in proxies:
            proxy.mode = mode

    def _fill(self, injection: Injection) -> None:
        target = injection.target
        if target == "queue":
            thread = threading.Thread(target=self._send_on_full_disk, daemon=True)
            self._threads.append(thread)
            thread.start()
            return
        self._full.add(target)
        self._parts.limit_files(target, is_full=True)

        def room() -> None:
            self._full.discard(target)
            self._parts.limit_files(target, is_full=False)

        self._later(injection.for_s, room)

    def _send_on_full_disk(self) -> None:
        if not send_on_full_disk(self._parts.settings, self._schedule.seed, self._oracle):
            self.misbehaved.append("no send of the file queue was refused on a full disk")

    def _start_second(self, target: str) -> None:
        second = self._parts.second(target)
        deadline = time.monotonic() + 25
        self._later(1.0, lambda: self._look_at_second(second, deadline))

    def _look_at_second(self, second: Second, deadline: float) -> None:
        """It must refuse, stand by or share, as is documented."""
        name, code, log = second.name, second.exit_code, second.log()
        refuses = name in ("streams", "gateway_port")
        stands_by = name in ("bridge", "files")
        if refuses and code is not None:
            if code == 0 or (name == "streams" and code != _REFUSED):
                self.misbehaved.append(f"the second {name} ended with {code}: {log[-300:]}")
            return
        if not refuses and code is not None:
            # What it needs may be away; then it says so and ends.
            return
        if name == "streams" and second.is_ready and self._parts.is_ready("streams"):
            self.misbehaved.append("two run_streams work on the same tables")
        # One that died just then has left its port or its lock: then this one works in its place.
        if (stands_by and "standby" in log) or (second.is_ready and not stands_by):
            self._later(2.0, second.kill)
            return
        if time.monotonic() < deadline:
            self._later(0.5, lambda: self._look_at_second(second, deadline))
            return
        if refuses:
            self.misbehaved.append(f"the second {name} neither refused nor ended")
        second.kill()
