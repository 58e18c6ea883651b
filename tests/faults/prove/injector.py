"""Does to the backbone what the schedule says, when it says so, and notes what was really done."""

from __future__ import annotations

import heapq
import itertools
import math
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from connectors.programs.local_stack.part_plan import BRIDGE, GATEWAY
from tests.faults.prove import store_faults
from tests.faults.prove.brokers import Brokers
from tests.faults.prove.client_faults import ClientFault
from tests.faults.prove.crash_points import arm, disarm, fired
from tests.faults.prove.delivery_checks import Outage
from tests.faults.prove.foreign_writer import write_despite_faults
from tests.faults.prove.hub_client import GaveUp
from tests.faults.prove.load_messages import send_on_full_disk
from tests.faults.prove.oracle import Oracle
from tests.faults.prove.schedule import (
    CRASH,
    CUT,
    DELETE,
    FOREIGN_WRITER,
    FULL_DISK,
    FULL_QUEUE,
    GATEWAY_STORE_FAULTS,
    KILL,
    LIBRARY,
    MOVE,
    MUTE,
    PEER,
    REPLACE,
    SECOND,
    SLOW,
    STOP,
    STORE_FAULTS,
    STREAMS,
    TRUNCATE,
    WIPE,
    Injection,
    Schedule,
)
from tests.faults.prove.second_programs import judge_second
from tests.faults.prove.seed_parts import Second, SeedParts
from tests.tcp_proxy import PASS, TcpProxy

_BROKERS: Final = ("kafka", "mosquitto")
_LIMIT_TICK_S: Final = 0.5
# Other parts still feel a fault this long after its end: a killed broker has to start again.
_RECOVERED_S: Final = 10.0
# With Spark starting beside it on two cores, a gateway has taken 24 s until it refused.
_SHOWS_WITHIN_S: Final = 45.0
_SHARES_S: Final = 8.0
# A fault of the local stores waits so long, from its time in the schedule, for a task to have met it.
_STORES_WITHIN_S: Final = 45.0
_STORES_LOOK_S: Final = 0.1


class Injector:
    """For one thread. `tick` it often; `over` says when the last fault is. `urls`: the gateways that clients
    ask, to which a second one is added while it lives. `client_faults`: those that clients make, by name.

    `done`: how often each fault was injected; a second one counts when it has shown what it is, and a fault of
    the stores when the settling tasks, or the gateway, have dealt with it. `misbehaved`:
    what a part did that it may not do. `left_out`: what the schedule holds and the run did not do, or not to
    its end. `has_shared`: a second gateway was among `urls` for all its time. `outages`: when gateways may have
    been slow or away because of a fault. `longest_start_s`: so long a second part took, or takes, to start.
    """

    def __init__(
        self,
        parts: SeedParts,
        brokers: Brokers,
        oracle: Oracle,
        schedule: Schedule,
        urls: list[str],
        client_faults: Mapping[str, ClientFault] | None = None,
    ) -> None:
        self._parts, self._brokers, self._oracle, self._schedule = parts, brokers, oracle, schedule
        self._points = parts.folder / "points"
        self._began = time.monotonic()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._armed: list[str] = []
        self._full: set[str] = set()
        self._limited_at = 0.0
        self._urls, self._client_faults = urls, client_faults or {}
        self._left = list(schedule.injections)
        self._staged: dict[Injection, store_faults.Stages] = {}
        self._without_end: set[Injection] = set()
        self._lasting: dict[Injection, float] = {}
        self._unproven: set[Second] = set()
        self.longest_start_s = 0.0
        self._troubled: defaultdict[str, float] = defaultdict(lambda: -math.inf)
        self.done: Counter[str] = Counter()
        self.misbehaved: list[str] = []
        self.left_out: list[str] = []
        self.has_shared = False
        self.outages: list[Outage] = []
        self._threads: list[threading.Thread] = []
        for injection in schedule.injections:
            self._at(injection.at_s, lambda injection=injection: self._begin(injection))

    def _at(self, at_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what))

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        self._at(time.monotonic() - self._began + after_s, what)

    @property
    def over(self) -> bool:
        """True if nothing more is to be done or undone."""
        return not self._events and not any(thread.is_alive() for thread in self._threads)

    @property
    def is_staging(self) -> bool:
        """True if a fault needs the load: records that are settled, or clients that ask a second gateway."""
        is_asked = any(second.name == GATEWAY for second in self._unproven)
        return (is_asked or bool(self._staged)) and not self.over

    def tick(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        while self._events and self._events[0][0] <= now - self._began:
            _, _, what = heapq.heappop(self._events)
            what()
        if self._full and now - self._limited_at > _LIMIT_TICK_S:
            # Processes that started in the meantime must have a full disk as well.
            self._limited_at = now
            for name in self._full:
                self._parts.limit_files(name, is_full=True)

    def heal(self) -> None:
        """End all that lasts. Points of streaming jobs and of the library stay armed: they come there late."""
        now = time.monotonic()
        self.left_out += [f"{injection.fault} was not injected" for injection in self._left]
        self.left_out += [
            f"{injection.fault} was to last {injection.for_s:g} s and was ended after {now - began:.1f} s"
            for injection, began in self._lasting.items()
        ]
        self.left_out += [
            f"the second {second.name} was ended before it had shown itself" for second in self._unproven
        ]
        for url in [second.settings.gateway_url for second in self._unproven]:
            self._forget(url)
        self._left.clear()
        self._lasting.clear()
        # A task may still deal with a fault that was done.
        for injection in self._staged.keys() - self._without_end:
            self._staged.pop(injection).close()
        self._events.clear()
        self._full.clear()
        disarm(self._points, but=(STREAMS, LIBRARY))
        self._brokers.heal()
        self._parts.heal()
        for thread in self._threads:
            thread.join(30)

    def disarm(self) -> None:
        """Nobody dies at a named point from now on."""
        disarm(self._points)

    def late(self) -> Counter[str]:
        """The deaths at named points, and the faults of the stores that were dealt with since `heal`."""
        met = [injection.fault for injection, stages in self._staged.items() if next(stages, None) is None]
        died = {fault: fired(self._points, fault.partition(":")[2]) for fault in self._armed}
        return Counter(met) + Counter(died)

    def _begin(self, injection: Injection) -> None:
        kind, target = injection.kind, injection.target
        self._left.remove(injection)
        if kind != SECOND:
            # A point may be reached at any time after this.
            lasts_s = math.inf if kind == CRASH else injection.for_s + _RECOVERED_S
            name = target.partition(".")[0]
            self._troubled[name] = max(self._troubled[name], time.monotonic() + lasts_s)
        if kind == CRASH:
            self._armed.append(injection.fault)
            arm(self._points, target, injection.nth)
            return
        if injection.fault in (*STORE_FAULTS, *GATEWAY_STORE_FAULTS):
            self._staged[injection] = self._stages(injection)
            self._go_on(injection, time.monotonic() + _STORES_WITHIN_S)
            return
        if injection.fault == FOREIGN_WRITER:
            self._run(self._write_foreign)
            return
        if injection.fault in self._client_faults:
            self._run(lambda: self._let_clients(injection))
            return
        if kind == FULL_QUEUE:
            self._fill_queues(injection)
            return
        if kind == SECOND:
            # Counted when it has shown itself.
            self._start_second(target)
            return
        self.done[injection.fault] += 1
        self._note_outage(injection)
        if kind == KILL:
            if target in _BROKERS:
                self._brokers.kill(target)
            else:
                self._parts.parts[target].kill()
        elif kind == WIPE:
            self._brokers.wipe_mosquitto()
        elif kind == STOP:
            self._signal(target, signal.SIGSTOP)
            self._lasts(injection, lambda: self._signal(target, signal.SIGCONT))
        elif kind in (CUT, SLOW, MUTE):
            self._bend(target, kind)
            self._lasts(injection, lambda: self._bend(target, PASS))
        elif kind == FULL_DISK:
            self._fill(injection)

    def _stages(self, injection: Injection) -> store_faults.Stages:
        if injection.fault in GATEWAY_STORE_FAULTS:
            own = self._parts.settings.state_path / f"gateway-{self._parts.settings.gateway.port}"
            return store_faults.of_gateway(injection.kind, own / "store", lambda: self._kill_gateway(injection))
        folder = self._parts.settings.state_path / "settling"
        if injection.kind == FULL_DISK:
            log = self._parts.parts[STREAMS].log_path
            return store_faults.on_full_disk(self._points, log, injection.for_s)
        if injection.kind == MOVE:
            return store_faults.elsewhere(folder, self._points, injection.for_s)
        stages = {
            DELETE: store_faults.deleted,
            TRUNCATE: store_faults.truncated,
            REPLACE: store_faults.replaced,
        }
        return stages[injection.kind](folder)

    def _kill_gateway(self, injection: Injection) -> None:
        self._troubled[GATEWAY] = max(self._troubled[GATEWAY], time.monotonic() + _RECOVERED_S)
        self._note_outage(injection)
        self._parts.parts[GATEWAY].kill()

    def _go_on(self, injection: Injection, until: float) -> None:
        """Resume a fault of the stores, which may need a task or a gateway at any of its stages."""
        stages = self._staged.get(injection)
        if stages is None:
            return
        is_done = next(stages, None)
        if is_done:
            self._without_end.add(injection)
        if is_done is None:
            self.done[injection.fault] += 1
        elif time.monotonic() < until:
            self._later(_STORES_LOOK_S, lambda: self._go_on(injection, until))
            return
        elif is_done:
            return  # `late` looks once more
        stages.close()
        del self._staged[injection]

    def _note_outage(self, injection: Injection) -> None:
        """Note when nobody can be held to a time at a gateway. One that crashes answers no request."""
        name = injection.target.partition(".")[0]
        settings = {GATEWAY: self._parts.settings, PEER: self._parts.peer_settings}.get(name)
        urls = (settings.gateway_url, settings.mcp_server_url) if settings else ()
        now = time.time()
        for url in ("",) if injection.target == "kafka" else urls:
            self.outages.append(Outage(url, now, now + injection.for_s + _RECOVERED_S))

    def _lasts(self, injection: Injection, undo: Callable[[], None]) -> None:
        def end() -> None:
            del self._lasting[injection]
            undo()

        self._lasting[injection] = time.monotonic()
        self._later(injection.for_s, end)

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
            self._run(self._send_on_full_disk)
            return
        if target in _BROKERS:
            self._brokers.fill_disk(target)
            self._lasts(injection, lambda: self._brokers.kill(target))
            return
        self._full.add(target)
        self._parts.limit_files(target, is_full=True)

        def room() -> None:
            self._full.discard(target)
            self._parts.limit_files(target, is_full=False)

        self._lasts(injection, room)

    def _fill_queues(self, injection: Injection) -> None:
        """Let Mosquitto drop messages for the bridge, which is killed. It counts if it has dropped some."""
        before = self._brokers.dropped
        self._brokers.limit_queues(is_full=True)
        self._troubled[BRIDGE] = max(self._troubled[BRIDGE], time.monotonic() + injection.for_s + _RECOVERED_S)
        self._parts.parts[BRIDGE].kill()

        def end() -> None:
            self._brokers.limit_queues(is_full=False)
            self.done[injection.fault] += self._brokers.dropped > before

        self._lasts(injection, end)

    def _let_clients(self, injection: Injection) -> None:
        try:
            self._client_faults[injection.fault](injection.for_s)
            self.done[injection.fault] += 1
        except GaveUp as error:
            self.left_out.append(f"{injection.fault} was not injected: {error}")
        except Exception as error:  # told in the result, which would not see it in a thread
            self.misbehaved.append(f"{injection.fault}: {type(error).__name__}: {error}")

    def _run(self, what: Callable[[], None]) -> None:
        thread = threading.Thread(target=what, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _write_foreign(self) -> None:
        trouble = write_despite_faults(self._parts.settings, self._oracle)
        if trouble:
            self.left_out.append(f"the foreign records were not written: {trouble!r}")
        else:
            self.done[FOREIGN_WRITER] += 1

    def _send_on_full_disk(self) -> None:
        if not send_on_full_disk(self._parts.settings, self._schedule.seed, self._oracle):
            self.misbehaved.append("no send of the file queue was refused on a full disk")

    def _start_second(self, target: str) -> None:
        second = self._parts.second(target)
        self._unproven.add(second)
        began = time.monotonic()
        self._later(1.0, lambda: self._look_at_second(second, began))

    def _look_at_second(self, second: Second, began: float) -> None:
        """It must refuse, stand by or share, as is documented."""
        name, code = second.name, second.exit_code
        self.longest_start_s = max(self.longest_start_s, time.monotonic() - began)
        trouble, shows = self._judged(second, began)
        if trouble is None and not shows and code is None and time.monotonic() < began + _SHOWS_WITHIN_S:
            self._later(0.5, lambda: self._look_at_second(second, began))
            return
        if trouble is not None:
            self.misbehaved.append(f"the second {name} {trouble}: {second.log()[-300:]}")
        self.done[f"{SECOND}:{name}"] += shows
        if name == GATEWAY and code is None and shows:
            # Long enough for some of the load to be its own.
            self._urls.append(second.settings.gateway_url)
            self._later(_SHARES_S, lambda: self._end_second(second))
        elif code is None:
            self._later(2.0, lambda: self._end_second(second))
        else:
            self._unproven.discard(second)

    def _judged(self, second: Second, began: float) -> tuple[str | None, bool]:
        """Return its forbidden action, if any, and whether it has shown the behaviour that it should have."""
        return judge_second(
            second.name,
            exit_code=second.exit_code,
            is_ready=second.is_ready,
            stands_by="standby" in second.log(),
            is_alone=self._was_troubled((second.own,), began) or not self._parts.is_ready(second.own),
            was_troubled=self._was_troubled((*_BROKERS, GATEWAY), began),
            is_late=time.monotonic() >= began + _SHOWS_WITHIN_S,
        )

    def _was_troubled(self, targets: Sequence[str], since: float) -> bool:
        """True if a fault at one of them, or its consequences, lasted into the time since a moment."""
        return any(self._troubled[target] >= since for target in targets)

    def _end_second(self, second: Second) -> None:
        self.has_shared = self.has_shared or second.settings.gateway_url in self._urls[1:]
        self._forget(second.settings.gateway_url)
        self._unproven.discard(second)
        second.kill()

    def _forget(self, url: str) -> None:
        if url in self._urls[1:]:
            self._urls.remove(url)
