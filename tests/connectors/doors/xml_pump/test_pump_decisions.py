"""The decisions of a pump: how many messages at once, which run alone, reports and the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from connectors.doors.xml_pump import payload, to_xml
from connectors.doors.xml_pump.dispatcher import Dispatcher
from connectors.doors.xml_pump.gateway_link import Leased, NotTaken
from connectors.doors.xml_pump.handlers import ConversationMessage, ListenerMessage, handles
from connectors.doors.xml_pump.listener_table import TableMaker
from connectors.doors.xml_pump.pump import Pump
from connectors.doors.xml_pump.settling import Settler
from connectors.plumbing.xml_payloads.deliveries import LeasedMessage, ListenerInfo, leased_from, listener_from
from connectors.plumbing.xml_wire.documents import XmlLimits
from trunkline_agent.errors import BackboneUnreachable

SPACE = "urn:example:decisions:1"
LIMIT_S = 20.0
_running: list[int] = []
_most: list[int] = []
_gates: dict[str, asyncio.Event] = {}


@payload("step", namespace=SPACE)
@dataclass
class Step:
    """Something to do; `gate`: what it waits for; with `stubborn` it minds no cancellation."""

    number: int
    gate: str = ""


@handles(Step)
async def step(message: ListenerMessage) -> bytes:
    """Does it, and notes how many do."""
    _running.append(message.payload.number)
    _most.append(len(_running))
    gate = message.payload.gate
    try:
        while gate and not _gates[gate].is_set():
            try:
                await _gates[gate].wait()
            except asyncio.CancelledError:
                if gate != "stubborn":
                    raise
    finally:
        _running.remove(message.payload.number)
    return to_xml(message.payload)


def info(name: str, **more: Any) -> ListenerInfo:
    """A listener of this file's handler."""
    handler = f"{__name__}:step"
    return listener_from({"listener": name, "root_tag": "step", "namespace": SPACE, "handler": handler, **more})


def message(number: int, listener: str = "stepper", gate: str = "", **more: Any) -> LeasedMessage:
    """A message as it is leased."""
    body = to_xml(Step(number, gate)).decode()
    fields = {"content_type": "application/xml", "timeout_ms": 5000, "thread": "t", "sender": "ann"}
    ids = {"listener": listener, "message_id": f"m{number}", "request_id": "r", "kind": "step"}
    return leased_from({**ids, **fields, "body": body, **more})


@dataclass
class Asked:
    """A lease that was asked for."""

    wants: dict[str, int]
    free: int
    alone: bool
    under_way: int
    at: float = field(default_factory=time.monotonic)


@dataclass
class Queue:
    """A gateway in memory: it hands out what it has, and remembers what it is told."""

    infos: Sequence[ListenerInfo]
    waiting: list[LeasedMessage] = field(default_factory=list)
    suspects: list[LeasedMessage] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    told: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refuses: Callable[[Sequence[Mapping[str, Any]]], Exception | None] = lambda done: None
    unreadable: list[Any] = field(default_factory=list)
    version: int = 1
    under_way: Callable[[], int] = lambda: 0

    async def started(self, pump: str) -> int:
        """Nothing was held."""
        return 0

    async def listeners(self) -> tuple[int, Sequence[ListenerInfo]]:
        """Return the listeners of the test."""
        return self.version, self.infos

    async def lease(
        self, pump: str, wants: Mapping[str, int], free: int, wait_ms: int, version: int, *, alone: bool
    ) -> Leased:
        """As many as fit; waits for something, as a gateway does."""
        self.asked.append(Asked(dict(wants), free, alone, self.under_way()))
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            given = self._given(wants, free, alone)
            over = time.monotonic() >= deadline or version != self.version or (self.suspects and not alone)
            if given or over:
                return Leased(self.version, len(self.suspects), given)
            await asyncio.sleep(0.01)

    def _given(self, wants: Mapping[str, int], free: int, alone: bool) -> list[LeasedMessage]:
        if alone:
            return [self.suspects.pop(0)] if self.suspects else []
        left, given = dict(wants), []
        for one in list(self.waiting):
            if left.get(one.listener, 0) > 0 and len(given) < free:
                left[one.listener] -= 1
                given.append(one)
                self.waiting.remove(one)
        return given

    async def settle(self, pump: str, done: Sequence[Mapping[str, Any]], request_id: str) -> Any:
        """Takes it, unless the test refuses."""
        self.requests.append(request_id)
        if (refusal := self.refuses(done)) is not None:
            raise refusal
        for one in done:
            self.told[one["message_id"]] = one
        if self.unreadable:
            return self.unreadable.pop(0)
        return [{"message_id": one["message_id"], "verdict": "accepted", "reason": None} for one in done]

    async def history(self, listener: str, thread: str, limit: int) -> Sequence[ConversationMessage]:
        """Nothing was said."""
        return []

    def outcomes(self) -> dict[str, str]:
        """By message id."""
        return {name: str(one["outcome"]) for name, one in self.told.items()}


def pumping(
    queue: Queue, folder: Path, during: Callable[[Pump], Awaitable[None]], **more: Any
) -> Coroutine[Any, Any, None]:
    """Run a pump on a queue while the test does something; then end it."""

    async def run() -> None:
        _most.clear()
        limits = XmlLimits()
        maker = TableMaker(folder, limits)
        settler = Settler(queue, "pump", 100_000)

        def dispatcher(spent: Callable[[str, int], None]) -> Dispatcher:
            return Dispatcher(queue, maker.system_pipeline, limits, 100_000, spent)

        pump = Pump("pump", queue, maker, dispatcher, settler, **{"concurrency": 10, "finish_s": 0.2, **more})
        queue.under_way = lambda: len(pump.under_way)
        stop = asyncio.Event()
        task = asyncio.create_task(pump.run(stop))
        try:
            async with asyncio.timeout(LIMIT_S):
                await during(pump)
        finally:
            stop.set()
            await task

    return run()


async def until(condition: Callable[[], object]) -> None:
    """Return when it is true; the pump's own time limit ends a test that waits in vain."""
    while not condition():
        await asyncio.sleep(0.005)


def pumped(queue: Queue, folder: Path, condition: Callable[[], object]) -> None:
    """Run a pump on a queue until the condition is true."""
    asyncio.run(pumping(queue, folder, lambda pump: until(condition)))


@pytest.mark.requirement("XP-08")
def test_no_more_run_at_once_than_each_listener_may_have_and_all_together(tmp_path: Path):
    queue = Queue([info("stepper", concurrency=3), info("other", concurrency=5)])
    _gates["all"] = asyncio.Event()
    for number in range(20):
        queue.waiting.append(message(number, "stepper" if number < 10 else "other", "all"))

    async def during(pump: Pump) -> None:
        await until(lambda: len(_running) == 6)
        taken = [one.listener for one in pump.under_way]
        assert (taken.count("stepper"), taken.count("other")) == (3, 3)
        _gates["all"].set()
        await until(lambda: len(queue.told) == 20)

    asyncio.run(pumping(queue, tmp_path, during, concurrency=6))
    assert max(_most) == 6
    assert set(queue.outcomes().values()) == {"handled"}
    assert all(0 < asked.free <= 6 for asked in queue.asked)


@pytest.mark.requirement("XP-08")
def test_a_place_that_gets_free_is_asked_for_while_another_request_still_waits(tmp_path: Path):
    queue = Queue([info("stepper", concurrency=1), info("idle", concurrency=1)])
    queue.waiting += [message(number) for number in range(5)]

    async def during(pump: Pump) -> None:
        begun = time.monotonic()
        await until(lambda: len(queue.told) == 5)
        # One request waits a second for a message to `idle`, and four messages would wait for its end.
        assert time.monotonic() - begun < 3

    asyncio.run(pumping(queue, tmp_path, during))


@pytest.mark.long
@pytest.mark.requirement("XP-08")
def test_a_pump_without_work_asks_seldom(tmp_path: Path):
    queue = Queue([info("stepper")])

    async def during(pump: Pump) -> None:
        await until(lambda: len(queue.asked) == 2)
        begun = time.monotonic()
        await until(lambda: len(queue.asked) == 3)
        assert time.monotonic() - begun > 0.5

    asyncio.run(pumping(queue, tmp_path, during))


@pytest.mark.long
@pytest.mark.requirement("XP-13")
def test_what_was_handed_out_before_runs_alone_and_the_rest_goes_on_between(tmp_path: Path):
    queue = Queue([info("stepper", concurrency=8)])
    queue.waiting += [message(number) for number in range(100)]
    queue.suspects += [message(number) for number in range(100, 110)]

    pumped(queue, tmp_path, lambda: len(queue.told) == 110)
    alone = [asked for asked in queue.asked if asked.alone]
    assert len(alone) >= 10
    assert {(asked.free, asked.under_way) for asked in alone} == {(1, 0)}


@pytest.mark.long
@pytest.mark.requirement("XP-13")
def test_suspects_that_nobody_may_have_now_make_no_busy_loop(tmp_path: Path):
    class Held(Queue):
        def _given(self, wants: Mapping[str, int], free: int, alone: bool) -> list[LeasedMessage]:
            return [] if alone else super()._given(wants, free, alone)

    queue = Held([info("stepper")])
    queue.suspects.append(message(1))

    async def during(pump: Pump) -> None:
        await until(lambda: len(queue.asked) > 2)
        begun, count = time.monotonic(), len(queue.asked)
        await until(lambda: time.monotonic() - begun > 1)
        assert len(queue.asked) - count < 20
        queue.waiting.append(message(2))
        await until(lambda: "m2" in queue.told)
        await until(lambda: sum(asked.alone for asked in queue.asked) > 2)

    asyncio.run(pumping(queue, tmp_path, during))
    _, second, third = [asked.at for asked in queue.asked if asked.alone][:3]
    assert third - second > 0.95  # in vain again, so it rests longer


@pytest.mark.long
@pytest.mark.requirement("XP-13")
def test_a_handler_that_minds_no_cancellation_keeps_no_suspect_waiting(tmp_path: Path):
    queue = Queue([info("stepper")])
    _gates["stubborn"] = asyncio.Event()
    queue.waiting.append(message(1, gate="stubborn", timeout_ms=50))

    async def during(pump: Pump) -> None:
        try:
            await until(lambda: queue.outcomes() == {"m1": "huh"})
            queue.suspects.append(message(2))
            await until(lambda: "m2" in queue.told and len(pump.under_way) == 1)
            assert pump.under_way[0].message_id == "m1"  # it has its place still
            assert all(asked.free == 1 for asked in queue.asked if asked.under_way)
        finally:
            _gates["stubborn"].set()
        await until(lambda: not pump.under_way)

    asyncio.run(pumping(queue, tmp_path, during, concurrency=2, drain_s=LIMIT_S))


@pytest.mark.long
@pytest.mark.requirement("XP-13")
def test_a_handler_that_takes_its_time_does_not_stop_the_rest_for_a_suspect(tmp_path: Path):
    queue = Queue([info("stepper")])
    _gates["long"] = asyncio.Event()
    queue.waiting.append(message(1, gate="long", timeout_ms=60_000))

    async def during(pump: Pump) -> None:
        await until(lambda: _running == [1])
        queue.suspects.append(message(2))
        await until(lambda: len(queue.asked) > 3)
        queue.waiting.append(message(3))
        await until(lambda: "m3" in queue.told)
        assert queue.outcomes() == {"m3": "handled"}
        _gates["long"].set()
        await until(lambda: "m2" in queue.told)

    asyncio.run(pumping(queue, tmp_path, during, drain_s=0.1))
    assert [asked.under_way for asked in queue.asked if asked.alone][:1] == [0]


@pytest.mark.long
@pytest.mark.requirement("XP-08")
def test_what_was_done_is_told_by_the_same_request_until_the_gateway_takes_it(tmp_path: Path):
    away = [BackboneUnreachable("away"), BackboneUnreachable("away")]
    queue = Queue([info("stepper")], refuses=lambda done: away.pop() if away else None)
    queue.waiting.append(message(1))

    pumped(queue, tmp_path, lambda: queue.told)
    assert len(queue.requests) == 3
    assert len(set(queue.requests)) == 1


@pytest.mark.parametrize("answer", [["no object"], [{"verdict": "accepted"}], None], ids=["text", "id", "none"])
def test_an_answer_that_cannot_be_read_is_asked_for_again_and_no_place_is_lost(tmp_path: Path, answer: Any):
    queue = Queue([info("stepper", concurrency=1)], unreadable=[answer])
    queue.waiting += [message(1), message(2)]

    pumped(queue, tmp_path, lambda: len(queue.told) == 2)
    assert queue.requests[0] == queue.requests[1] != queue.requests[2]
    assert queue.outcomes() == {"m1": "handled", "m2": "handled"}


def test_an_answer_that_the_gateway_never_takes_becomes_a_huh_and_holds_up_no_other(tmp_path: Path):
    def refuses(done: Sequence[Mapping[str, Any]]) -> Exception | None:
        wrong = [one for one in done if one["message_id"] == "m3" and one["outcome"] == "handled"]
        return NotTaken("no") if wrong else None

    queue = Queue([info("stepper")], refuses=refuses)
    queue.waiting += [message(number) for number in range(6)]

    pumped(queue, tmp_path, lambda: len(queue.told) == 6)
    assert {name for name, outcome in queue.outcomes().items() if outcome == "huh"} == {"m3"}


def test_a_pump_that_ends_gives_back_what_does_not_end_in_time(tmp_path: Path):
    queue = Queue([info("stepper")])
    _gates["never"] = asyncio.Event()
    queue.waiting += [message(1, gate="never"), message(2)]

    pumped(queue, tmp_path, lambda: "m2" in queue.told and queue.under_way())
    assert queue.outcomes() == {"m1": "nack", "m2": "handled"}


@pytest.mark.requirement("XP-12")
def test_a_message_of_a_new_listener_waits_for_the_pump_to_know_it(tmp_path: Path):
    queue = Queue([info("stepper")])

    async def during(pump: Pump) -> None:
        await until(lambda: queue.asked)
        queue.infos, queue.version = [info("newcomer")], 2
        queue.waiting.append(message(1, "newcomer"))
        await until(lambda: queue.told)

    asyncio.run(pumping(queue, tmp_path, during))
    assert queue.outcomes() == {"m1": "handled"}


@pytest.mark.requirement("XP-10")
def test_a_person_and_a_listener_whose_handler_cannot_be_loaded_are_not_asked_for(tmp_path: Path):
    queue = Queue([info("stepper"), info("b", handler="no.such.module:f"), info("person", type="human")])

    pumped(queue, tmp_path, lambda: queue.asked)
    assert all(list(asked.wants) == ["stepper"] for asked in queue.asked)


def test_what_waits_for_a_removed_listener_goes_back_with_a_huh(tmp_path: Path):
    queue = Queue([info("stepper"), info("gone")])
    queue.waiting.append(message(1, "gone", listener_gone=True))

    pumped(queue, tmp_path, lambda: queue.told)
    assert queue.told["m1"]["outcome"] == "huh"
    assert "the listener was removed" in json.dumps(queue.told["m1"])
