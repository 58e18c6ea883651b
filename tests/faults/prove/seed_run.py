"""One seed: a backbone of its own on the shared brokers, load at all doors, faults, and what must hold then."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.faults.prove import evidence
from tests.faults.prove.brokers import Brokers
from tests.faults.prove.clients import Clients
from tests.faults.prove.comparison import MISBEHAVED, Finding, compare
from tests.faults.prove.delivery_load import NEEDED, judge_deliveries
from tests.faults.prove.delivery_notes import Deliveries
from tests.faults.prove.hub_client import Clock
from tests.faults.prove.injector import Injector
from tests.faults.prove.library_load import check_library
from tests.faults.prove.load_messages import FRED, readers_of
from tests.faults.prove.oracle import ACKED, Oracle
from tests.faults.prove.quiet import Quiet
from tests.faults.prove.schedule import FULL_STORES, PEER, STREAMS, Schedule
from tests.faults.prove.seed_parts import SeedParts, seed_settings

LIMIT_S: Final = 100.0
DOORS: Final = frozenset({"http", "file", "mcp", "mqtt", "xml"})
# Seconds of the limit that comparing and ending may take, and seconds that coming to rest must have.
_JUDGE_S: Final = 12.0
_REST_S: Final = 20.0
# A machine of its own starts the doors within the first of these times. Where other programs slow the start
# down, the run has more time in proportion. After the second time, the start is too slow to go on.
_USUAL_START_S: Final = 15.0
_START_S: Final = 60.0
# The faults of the schedule run to their end as long as so many seconds remain.
_FAULTS_END_S: Final = _JUDGE_S + 1.5 * _REST_S
# A driver that died at a point with less than this left, or twice as much as its start took, would not be back
# and at the log's end in time.
_RESTART_S: Final = 30.0
_TICK_S: Final = 0.05
_SHOWN: Final = 40
# Spark starts under load; so long the load goes on when it works, and so long it is waited for at most.
_SPARK_WORKS_S: Final = 5.0
_SPARK_STARTS_S: Final = 14.0
# So long the load goes on while a fault of the stores is under way.
_STAGING_S: Final = 2.0
_LOOK_S: Final = 0.4


@dataclass
class SeedResult:
    """The result of a seed; one line of the results.

    `is_judged`: its faults were injected, each door acknowledged something, and the backbone came to rest.
    `waited_for`: what it did not rest for, in seconds. `folder`: where its data is, if it was kept.
    """

    seed: int
    acknowledged: int = 0
    findings: list[dict[str, str]] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    by_door: dict[str, int] = field(default_factory=dict)
    deliveries: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    waited_for: dict[str, float] = field(default_factory=dict)
    folder: str = ""
    is_judged: bool = False

    def took(self, seconds: float, limit_s: float = LIMIT_S) -> None:
        """Note how long it took; over the limit it is a finding."""
        self.seconds = round(seconds, 1)
        if self.seconds > limit_s:
            self.findings.append(
                asdict(Finding(MISBEHAVED, f"it took {self.seconds:.1f} s, at most {limit_s:.0f}"))
            )

    def as_json(self) -> dict[str, Any]:
        """The line."""
        return asdict(self)


class SeedRun:
    """Runs one seed below `folder`, which is new and its own. For the main thread. `replaced`: modules that
    stand in the place of a part's program, by the part's name. `limit_s`: more where it is not alone.
    """

    def __init__(
        self,
        schedule: Schedule,
        folder: Path,
        brokers: Brokers,
        replaced: dict[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._schedule, self._brokers, self._limit_s = schedule, brokers, limit_s
        self._began = time.monotonic()
        self._settings = seed_settings(folder, brokers, schedule.seed)
        has_small_disk = any(one.fault == FULL_STORES for one in schedule.injections)
        self._parts = SeedParts(self._settings, folder, replaced or {}, has_small_disk=has_small_disk)
        self.oracle = Oracle(folder / "oracle.jsonl")
        self._deliveries = Deliveries(folder / "deliveries.jsonl")
        self._result = SeedResult(schedule.seed)
        self._late: list[str] = []
        self._readers = readers_of()
        self._is_at_rest = False
        self._unrest: str | None = "not looked at"
        (folder / "schedule.json").write_text(json.dumps(schedule.as_json(), indent=1))

    @property
    def _left_s(self) -> float:
        return self._limit_s - (time.monotonic() - self._began)

    @property
    def _restart_s(self) -> float:
        took_s = self._parts.parts[STREAMS].ready_after_s or 0.0
        return _JUDGE_S + max(_RESTART_S, 2 * took_s)

    def run(self) -> SeedResult:
        """All of it; ends every process that it has started, whatever happens."""
        clients: Clients | None = None
        clock = Clock()
        try:
            self._parts.start()
            doors = ("gateway", PEER, "bridge", "files", "xml_pump")
            self._wait(lambda: self._parts.is_ready(*doors), _START_S, "the start of the doors")
            self._limit_s = max(self._limit_s, LIMIT_S * slowness(time.monotonic() - self._began))
            clock.begin(0.0, _START_S)
            peer = self._parts.peer_settings
            clients = Clients(self._settings, peer, self._schedule, self.oracle, self._deliveries, clock)
            self._phase("start")
            injector = self._load(clients, clock)
            self._phase("load")
            injector.heal()
            self._rest(injector, clients)
            self._phase("rest")
            self._judge(injector, clients)
            self._phase("judge")
        finally:
            self._brokers.heal()
            if clients is not None:
                clients.close()
            self._parts.end()
        self._phase("end")
        self._result.took(time.monotonic() - self._began, self._limit_s)
        return self._result

    def _phase(self, name: str) -> None:
        spent = sum(self._result.phases.values())
        self._result.phases[name] = round(time.monotonic() - self._began - spent, 1)

    def _wait(self, condition: Callable[[], bool], within_s: float, what: str) -> bool:
        deadline = time.monotonic() + within_s
        while not condition():
            self._parts.look_after()
            if time.monotonic() > deadline:
                self._late.append(f"{what}: not within {within_s:.0f} s")
                return False
            time.sleep(_TICK_S)
        return True

    def _load(self, clients: Clients, clock: Clock) -> Injector:
        """Clients at every door, and the faults meanwhile."""
        clock.begin(self._schedule.load_s, max(5.0, self._left_s - self._schedule.load_s - _JUDGE_S - _REST_S))
        injector = Injector(
            self._parts, self._brokers, self.oracle, self._schedule, clients.urls, clients.faults()
        )
        clients.start()
        longest, has_worked = time.monotonic() + self._schedule.load_s + _SPARK_STARTS_S, False
        while (clock.may_begin() or not injector.over) and self._left_s > _FAULTS_END_S:
            injector.tick()
            self._limit_s = max(self._limit_s, LIMIT_S * slowness(injector.longest_start_s))
            has_worked = has_worked or self._parts.parts[STREAMS].ready_after_s is not None
            if not has_worked and time.monotonic() < longest:
                clock.go_on(_SPARK_WORKS_S)
            if injector.is_staging:
                clock.go_on(_STAGING_S)
            self._parts.look_after()
            time.sleep(_TICK_S)
        return injector

    def _rest(self, injector: Injector, clients: Clients) -> None:
        """Everything is up again, what was begun has its answer, and nothing moves any more."""
        quiet, looked = Quiet(self._settings, self.oracle, self._readers), time.monotonic()
        while not self._is_at_rest and self._left_s > _JUDGE_S:
            self._parts.look_after_for(_LOOK_S)
            if self._left_s < self._restart_s:
                injector.disarm()
            self._unrest = self._under_way(clients)
            if self._unrest is None:
                self._is_at_rest = quiet.look()
                self._unrest = quiet.why
            waited, now = self._result.waited_for, time.monotonic()
            what = (self._unrest or "")[:_SHOWN]
            waited[what] = round(waited.get(what, 0.0) + now - looked, 1)
            looked = now
        if not self._is_at_rest:
            self._late.append(f"not at rest {self._limit_s - _JUDGE_S:.0f} s after its begin: {self._unrest}")
        injector.disarm()
        # Readers that hold a message end before it is looked at where it stands.
        clients.leave()

    def _under_way(self, clients: Clients) -> str | None:
        if not self._brokers.are_up():
            return "a broker is not up"
        parts = [f"{part.name} is {part.state}" for part in self._parts.parts.values() if part.state != "ready"]
        if parts:
            return ", ".join(parts)
        return f"{', '.join(clients.waiting)} wait for an answer" if clients.waiting else None

    def _judge(self, injector: Injector, clients: Clients) -> None:
        found = evidence.gather(self._settings, {"gateway": self._settings.gateway_url}, (FRED,))
        # That it is still under way is a finding as well.
        findings = compare(self.oracle.notes(), found, self._readers, is_at_rest=self._is_at_rest)
        findings += judge_deliveries(
            self._deliveries,
            self.oracle,
            found.views.mail,
            found.ledger,
            injector.outages,
            is_at_rest=self._is_at_rest,
        )
        findings += check_library(
            clients.library.notes, found.views.mail, found.ledger, is_at_rest=self._is_at_rest
        )
        result, done = self._result, injector.done + injector.late() + clients.habits()
        result.acknowledged = self.oracle.acknowledged
        result.by_door = dict(Counter(note.door for note in self.oracle.notes(ACKED)))
        result.deliveries = clients.deliveries.done()
        untried = injector.left_out + not_tried(
            result.by_door,
            result.deliveries,
            has_shared=injector.has_shared,
            answers_elsewhere=clients.answers_elsewhere,
        )
        result.is_judged = self._is_at_rest and not untried
        troubles = (*injector.misbehaved, *clients.failures, *clients.late, *self._late, *untried)
        findings += [Finding(MISBEHAVED, what) for what in troubles]
        result.findings = [asdict(finding) for finding in findings]
        result.faults = {name: count for name, count in sorted(done.items()) if count}


def slowness(start_s: float) -> float:
    """Return how many times as long a run may take, from the time that the start of the doors took."""
    return min(max(1.0, start_s / _USUAL_START_S), _START_S / _USUAL_START_S)


def not_tried(
    by_door: Mapping[str, int], deliveries: Mapping[str, int], *, has_shared: bool, answers_elsewhere: int
) -> list[str]:
    """Return what a run did not test.

    Args:
        by_door: How much each door acknowledged.
        deliveries: How often consumers and followers got an answer of each kind.
        has_shared: Whether a fault was a second gateway too many.
        answers_elsewhere: How many requests that gateway has answered.
    """
    found = [f"no delivery of the kind {name}" for name in NEEDED if not deliveries.get(name)]
    found += [f"the door {door} acknowledged nothing" for door in sorted(DOORS) if not by_door.get(door)]
    if has_shared and not answers_elsewhere:
        found.append("the second gateway answered nobody")
    return found
