"""Pumps that are killed, blocked, stopped or left alone: each message is handled, each answered once."""

from __future__ import annotations

import itertools
import re
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from connectors.log.publisher import Publisher
from schemas.streams.control.organism import Listener, ListenerAdded, OrganismLoaded
from tests.broker_processes import BrokerProcess, ProgramProcess, wait_until
from tests.connectors.doors.xml_pump.pump_handlers import RELEASE, SPACE
from tests.connectors.doors.xml_pump.pump_stack import Poster, PumpStack, element, listener, pump_stack

CONCURRENCY = 6
BLOCKED = 70
ORGANISM = {
    "listeners": [
        listener("slow", "search", "slow"),
        listener("rough", "rough", "rough", timeout_s=0.5),
        listener("worker", "work", "work", concurrency=CONCURRENCY, timeout_s=5),
    ],
}
MAILBOX = "/api/hub/mailboxes/default"


@pytest.fixture(scope="module")
def started(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PumpStack]:
    """A gateway whose listeners nobody runs yet."""
    with pump_stack(kafka_broker, tmp_path_factory.mktemp("faults"), ORGANISM) as found:
        yield found


@pytest.fixture
def stack(started: PumpStack) -> Iterator[PumpStack]:
    """The same, without the pumps and notes of the test before."""
    for file in started.folder.glob("*.jsonl"):
        file.unlink()
    started.forget(RELEASE)
    yield started
    started.end_pumps()


def number_of(answer: dict[str, Any]) -> int:
    found = re.search("<number>(.*?)</number>", answer["text"])
    assert found is not None, answer
    return int(found[1])


@pytest.mark.requirement("XP-13")
def test_a_message_that_kills_its_pump_is_dead_after_three_and_those_beside_it_are_handled(stack: PumpStack):
    asker = stack.poster()
    (poison,) = asker.send(element("rough", how="die"))
    for number in range(30):
        asker.send(element("work", number=number))
    for life in range(1, 4):
        pump = stack.start_pump(wait=False)
        assert pump.process.wait(20) == 9
        assert len(stack.notes("rough")) == life
    stack.start_pump()
    answers = asker.answers(31)
    (told,) = [one for one in answers if one["type"] == "huh"]
    assert "failed 3 times" in told["text"]
    assert sorted(number_of(one) for one in answers if one != told) == list(range(30))
    shown = stack.operator.get(f"{MAILBOX}/rough").json()["messages"]
    assert [(one["message_id"], one["status"], one["attempts"]) for one in shown] == [(poison, "dead", 3)]


@pytest.mark.requirement("DL-10")
def test_the_replay_of_a_listeners_dead_message_is_handled_and_answered_in_its_conversation(stack: PumpStack):
    asker = stack.poster()
    (dead,) = asker.send(element("rough", how="ill"))
    for _ in range(3):
        assert stack.start_pump(wait=False).process.wait(20) == 9
    (told,) = asker.answers(1)
    assert told["type"] == "huh"
    (stack.folder / RELEASE).touch()
    stack.start_pump()
    replayed = stack.operator.post(f"{MAILBOX}/rough/messages/{dead}/replay")
    assert replayed.status_code == 200, replayed.text
    asker.answers(2)
    huh, answer = stack.operator.get(f"{MAILBOX}/{asker.name}").json()["messages"]
    assert (huh["kind"], huh["in_reply_to"]) == ("huh", dead)
    assert (answer["kind"], answer["in_reply_to"]) == ("worked", replayed.json()["message_id"])
    assert answer["thread"] == huh["thread"]


def kill(stack: PumpStack, pump: ProgramProcess) -> dict[int, float]:
    """Kill a pump and start another; the dead one's process id, and when it was surely dead."""
    pump.stop(signal.SIGKILL)
    stack.start_pump(wait=False)
    return {pump.process.pid: time.monotonic()}


def at_once_most(stack: PumpStack, died: dict[int, float]) -> int:
    """How many handlers ran at once, of all processes. One that was killed ran until its process was dead."""
    ended = {(one["pid"], one["number"]): one["at"] for one in stack.notes("ended")}
    changes = []
    for one in stack.notes("began"):
        end = ended.get((one["pid"], one["number"]), died.get(one["pid"]))
        assert end is not None, one
        changes += [(one["at"], 1), (end, -1)]
    return max(itertools.accumulate(step for _, step in sorted(changes)))


def are_answered(asker: Poster, numbers: set[int]) -> bool:
    """True if all of these have been answered."""
    return numbers <= {number_of(one) for one in asker.answers(0)}


@pytest.mark.requirement("XP-08")
@pytest.mark.requirement("XP-13")
def test_pumps_killed_under_load_lose_no_message_and_answer_none_twice(stack: PumpStack):
    count = 300
    asker = stack.poster()
    stack.start_pump()
    stack.start_pump()
    ids = [asker.send(element("work", number=number))[0] for number in range(count)]
    died: dict[int, float] = {}
    for begin in (40, 150):
        for behind in (0, 40):
            asker.answers(begin + behind)
            died |= kill(stack, stack.pumps[-2])
        # Messages that were hit twice finish before any other is hit: a third time would make them dead.
        hit = {one["number"] for one in stack.notes("began") if one["pid"] in died}
        wait_until(partial(are_answered, asker, hit), 30, "what was hit is done")

    answers = asker.answers(count, 60)
    assert Counter(number_of(one) for one in answers) == Counter(range(count))
    assert {one["type"] for one in answers} == {"worked"}
    shown = stack.operator.get(f"{MAILBOX}/worker", params={"limit": 1000}).json()["messages"]
    statuses = {one["message_id"]: one["status"] for one in shown}
    assert {statuses[one] for one in ids} == {"claimed"}
    posted = [one["body"] for one in stack.records() if one["type"] == "message.posted"]
    assert len({one["message_id"] for one in posted if one["to"] == asker.name}) == count
    assert any(one["pid"] in died for one in stack.notes("began"))
    assert 1 < at_once_most(stack, died) <= CONCURRENCY


@pytest.mark.requirement("XP-13")
def test_a_handler_that_blocks_all_others_ends_its_process_which_says_who_it_was(stack: PumpStack):
    asker = stack.poster()
    pump = stack.start_pump()
    asker.send(element("rough", how="block"))
    assert pump.process.wait(20) == BLOCKED
    assert '"event": "event_loop_blocked"' in pump.log()
    assert '"listener": "rough"' in pump.log()
    stack.operator.post(f"{MAILBOX}/rough/clear").raise_for_status()


def test_a_pump_that_is_told_to_end_finishes_what_runs_and_takes_nothing_new(stack: PumpStack):
    asker = stack.poster()
    pump = stack.start_pump()
    asker.send(element("search", query="a"))
    stack.wait_notes("slow", 1)
    pump.process.send_signal(signal.SIGTERM)
    wait_until(lambda: '"event": "ending"' in pump.log(), what="it ends")
    asker.send(element("search", query="b"))
    (stack.folder / RELEASE).touch()
    assert pump.process.wait(20) == 0
    assert len(asker.answers(1)) == 1
    assert len(stack.notes("slow")) == 1
    stack.start_pump()
    assert len(asker.answers(2)) == 2


@pytest.mark.requirement("XP-08")
def test_what_was_done_while_the_gateway_was_away_is_told_when_it_is_back(stack: PumpStack):
    asker = stack.poster()
    pump = stack.start_pump()
    asker.send(element("search", query="a"))
    stack.wait_notes("slow", 1)
    stack.gateway.program.stop(signal.SIGKILL)
    (stack.folder / RELEASE).touch()
    wait_until(lambda: '"what": "settle"' in pump.log(), what="it cannot tell")
    stack.gateway.program = ProgramProcess(
        "connectors.programs.gateway_program", stack.gateway.settings, stack.folder, "back"
    )
    stack.gateway.program.wait_ready()
    assert [one["type"] for one in asker.answers(1)] == ["found"]
    assert len(stack.notes("slow")) == 1
    assert pump.process.poll() is None


GREETING = f'''
import asyncio
from dataclasses import dataclass
from connectors.doors.xml_pump import payload, to_xml
from connectors.doors.xml_pump.handlers import handles
from tests.connectors.doors.xml_pump.pump_handlers import RELEASE, Worked, folder, note

@payload("greet", namespace="{SPACE}")
@dataclass
class Greet:
    waits: bool

@handles(Greet)
async def greet(message):
    note("greet", waits=message.payload.waits)
    while message.payload.waits and not (folder() / RELEASE).exists():
        await asyncio.sleep(0.02)
    return to_xml(Worked(NUMBER))

NUMBER = 1
'''


@pytest.mark.requirement("XP-12")
def test_a_handler_is_swapped_while_the_old_one_finishes_what_it_has_begun(stack: PumpStack):
    file = stack.folder / "greeting.py"
    file.write_text(GREETING)
    greeter = Listener(name="greeter", root_tag="greet", namespace=SPACE, handler="greeting:greet")
    asker = stack.poster()
    pump = stack.start_pump()
    with Publisher(stack.settings) as publisher:

        def change(body: Any) -> None:
            publisher.append(body.record(door="xml", principal="operator")).result(10)

        change(ListenerAdded(request_id=uuid.uuid4().hex, listener=greeter))
        wait_until(lambda: "greeter" in {one["listener"] for one in stack.messages()}, what="it is there")
        asker.send(element("greet", waits="true"))
        stack.wait_notes("greet", 1)
        seen = pump.log().count('"event": "listeners"')

        file.write_text(GREETING.replace("NUMBER = 1", "NUMBER = 2"))
        change(OrganismLoaded(request_id=uuid.uuid4().hex, digest="0" * 64, listeners=[greeter]))
        wait_until(lambda: pump.log().count('"event": "listeners"') > seen, what="the pump has heard of it")
    asker.send(element("greet", waits="false"))
    assert [number_of(one) for one in asker.answers(1)] == [2]
    (stack.folder / RELEASE).touch()
    assert [number_of(one) for one in asker.answers(2)] == [2, 1]
    assert {one["pid"] for one in stack.notes("greet")} == {pump.process.pid}
