"""The engine keeps the rules of all requests: rights, turns, places, limits, waits and traces of what it did.

Its requests come from no socket, and its log answers when the test lets it, so each step can be looked at.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from connectors.gateway.engine.engine import Engine
from connectors.gateway.engine.operation import Exchange
from connectors.gateway.fairness.refusal_pace import BURST
from connectors.gateway.messages.lease_operations import lease_operations
from connectors.gateway.messages.message_operations import MESSAGES, message_operations
from connectors.gateway.services.listeners import Listeners
from connectors.gateway.web.admission import Gate
from connectors.gateway.web.answers import ApiError
from connectors.gateway.web.identities import Unidentified
from connectors.gateway.web.metrics import Metrics
from connectors.gateway.web.policy import Caller
from connectors.live.settled_feed import SettledRecord
from schemas.streams.mailboxes.mailbox_requests import claim_record
from schemas.streams.principal.principals import OPERATOR
from schemas.wire.record import OutgoingRecord
from tests.connectors.agent_mcp.folded_hub import FoldedHub
from tests.schemas.hub_records import public_key
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.verdicts import TOO_LARGE

pytestmark = pytest.mark.requirement("ST-90")

SEND, TAKE = f"POST {MESSAGES}".encode(), f"GET {MESSAGES}".encode()
CALLERS = {
    "bo": Caller("bo", "agent"),
    "ada": Caller("ada", "worker"),
    "cy": Caller("cy", "worker"),
    "op": Caller(OPERATOR, OPERATOR),
    "eye": Caller("eye", "viewer"),
    "task": Caller("bo", "agent", "t1", "k1", ("message.broadcast",)),
}


class Lines:
    """The lines of requests, kept in the test."""

    def __init__(self) -> None:
        self.added: list[tuple[Any, ...]] = []

    def add(self, *line: Any) -> None:
        """As of the lines of a gateway."""
        self.added.append(line)


class HeldHub(FoldedHub):
    """A hub whose log settles what is sent to it when `settle` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.identities: Any = self
        self.listeners = Listeners(self.entries, lambda _: [])
        self.metrics, self.request_lines = Metrics(), Lines()
        self.under_log: list[tuple[OutgoingRecord, Callable[[Any], None]]] = []
        self.join("bo", public_key(1))
        self.gate = Gate(self, self, 1000, print, self.turns, self.pace)  # type: ignore[arg-type]
        operations = (*message_operations(self), *lease_operations(self))  # type: ignore[arg-type]
        self.engine = Engine(self, self.gate, operations)  # type: ignore[arg-type]

    def identify(self, authorization: str) -> Caller | Unidentified:
        """As of the identities. The token is a name."""
        return CALLERS.get(authorization.removeprefix("Bearer "), Unidentified("unknown"))

    def settle_then(self, record: OutgoingRecord, done: Callable[[SettledRecord | Exception], None]) -> None:
        """As of the appender."""
        self.under_log.append((record, done))

    def settle_held(self, *places: int, error: Exception | None = None) -> None:
        """Settle records that were sent, by default all in their order, or fail them."""
        held, self.under_log = self.under_log, []
        for place in places or range(len(held)):
            record, done = held[place]
            done(error or self.add(record))

    @property
    def senders(self) -> list[str]:
        """The principals of the records under way."""
        return [record.principal for record, _ in self.under_log]


class Asking:
    """A request and what becomes of it."""

    def __init__(
        self,
        hub: HeldHub,
        name: str,
        route: bytes = SEND,
        body: dict[str, Any] | None = None,
        query: bytes = b"",
        *,
        is_there: bool = True,
        has_place: bool = True,
        key: bytes | None = None,
    ) -> None:
        self.answers, self.passed_on, self.head, self.is_operator = list[tuple[int, Any]](), 0, b"", False
        self._is_there, self._has_place = is_there, has_place
        operation, path, _ = hub.engine.find(route + b" HTTP/1.1")
        assert operation is not None
        sent = {"recipient": "bo", "type": "note"} if body is None and route == SEND else body
        data = b"" if sent is None else json.dumps(sent).encode()
        headers = {b"authorization": b"Bearer " + name.encode(), b"content-type": b"application/json"}
        headers |= {} if key is None else {b"idempotency-key": key}
        self.exchange = Exchange(self, operation, data, path, headers, query, data)
        self.is_admitted = hub.engine.admit(self.exchange)
        if self.is_admitted:
            hub.engine.begin(self.exchange)

    def is_heard(self) -> bool:
        """As of the connection."""
        return self._is_there

    def admits(self, principal: str, *, is_operator: bool) -> bool:
        """As of the connection."""
        self.is_operator = is_operator
        return self._has_place

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """As of the connection."""
        self.head = head
        self.answers.append((status, json.loads(body)))

    def pass_on(self, exchange: Exchange) -> None:
        """As of the connection."""
        self.passed_on += 1

    @property
    def statuses(self) -> list[int]:
        """The statuses of the answers, of which there is to be one."""
        return [status for status, _ in self.answers]


async def steps(count: int = 10) -> None:
    """Let the event loop make some steps."""
    for _ in range(count):
        await asyncio.sleep(0)


def run(test: Callable[[HeldHub], Awaitable[None]]) -> None:
    """Run a test on an event loop, with a hub of its own."""

    async def ran() -> None:
        await asyncio.wait_for(test(HeldHub()), 20)

    asyncio.run(ran())


def test_each_caller_has_its_own_rights_and_not_those_of_another_one_of_its_role() -> None:
    async def test(hub: HeldHub) -> None:
        assert Asking(hub, "bo").is_admitted
        for name in ("eye", "task", "nobody"):
            assert not Asking(hub, name).is_admitted
        assert Asking(hub, "task", TAKE).is_admitted and Asking(hub, "ada").is_admitted
        assert not Asking(hub, "ada", has_place=False).is_admitted
        assert Asking(hub, "op").is_operator and not Asking(hub, "ada").is_operator

    run(test)


def test_a_principal_begins_one_request_in_a_step_and_has_few_records_under_way() -> None:
    async def test(hub: HeldHub) -> None:
        asked = [Asking(hub, "ada") for _ in range(7)]
        calm = Asking(hub, "cy")
        assert hub.senders == ["ada", "cy"]
        await steps()
        assert hub.senders == ["ada", "cy", "ada", "ada", "ada"]
        hub.settle_held()
        assert hub.senders == ["ada"] * 3 and calm.statuses == [200]
        hub.settle_held()
        assert [one.statuses for one in asked] == [[200]] * 7
        assert not hub.under_way.mailboxes and not hub.under_way._count

    run(test)


def test_all_that_wait_behind_records_that_fail_are_answered_once() -> None:
    async def test(hub: HeldHub) -> None:
        asked = [Asking(hub, "ada") for _ in range(9)]
        await steps()
        while hub.under_log:
            hub.settle_held(error=BackboneUnreachable("away"))
        await steps()
        assert [one.statuses for one in asked] == [[503]] * 9
        assert not hub.under_way.mailboxes and not hub.under_way._count

    run(test)


def test_a_request_with_several_records_is_answered_after_the_last_with_what_each_became() -> None:
    async def test(hub: HeldHub) -> None:
        for _ in range(3):
            Asking(hub, "ada")
            await steps()
            hub.settle_held()
        taking = Asking(hub, "bo", TAKE, query=b"limit=2&lease=60")
        hub.settle_held()
        await steps()
        ((status, taken),) = taking.answers
        assert status == 200 and taken["left"] == 1
        leased = [one["id"] for one in taken["messages"]]
        (other,) = set(hub.mailboxes.waiting(("default", "bo"))) - set(leased)
        wanted = [other, *leased]
        body = {"lease_id": taken["lease_id"], "message_ids": wanted}
        asked = Asking(hub, "bo", f"POST {MESSAGES}/ack".encode(), body)
        held = hub.under_log
        hub.settle_held(2, 1)
        assert not asked.answers
        hub.under_log = held[:1]
        hub.settle_held()
        ((status, said),) = asked.answers
        assert status == 200 and said["done"] == leased
        assert [one["message_id"] for one in said["refused"]] == [other]

    run(test)


def test_a_refusal_beyond_a_limit_is_held_recorded_counted_and_has_its_line() -> None:
    async def test(hub: HeldHub) -> None:
        hub.limit("ada", messages_per_minute=1)
        first = Asking(hub, "ada")
        hub.settle_held()
        for _ in range(BURST):
            hub.pace.held_s("ada")
        await steps()
        second = Asking(hub, "ada")
        await steps()
        assert first.statuses == [200] and second.statuses == []
        while not second.answers:
            await asyncio.sleep(0.01)
        assert second.statuses == [429] and hub.refused[0][0] == "rate_limited"
        assert [line[:3] for line in hub.request_lines.added] == [
            ("POST", MESSAGES, 200),
            ("POST", MESSAGES, 429),
        ]
        counted = [line for line in str(hub.metrics.text()).splitlines() if MESSAGES in line]
        for status in (200, 429):
            assert any(f'status="{status}"' in line and "requests_total" in line for line in counted)

    run(test)


def test_a_repeated_request_is_told_apart_from_a_new_one_also_beyond_a_limit() -> None:
    async def test(hub: HeldHub) -> None:
        hub.limit("ada", messages_per_minute=1)
        found = []
        for _ in range(2):
            found.append(Asking(hub, "ada", key=b"key-1"))
            hub.settle_held()
            await steps()
        assert found[0].answers == found[1].answers and found[0].statuses == [200]
        assert [re.findall(rb"verdict: (\w+)", one.head) for one in found] == [[b"accepted"], [b"duplicate"]]

    run(test)


def test_a_mailbox_that_the_log_calls_full_gets_no_more_records_for_a_while() -> None:
    async def test(hub: HeldHub) -> None:
        hub.limit("bo", bytes_most=10)
        long = {"recipient": "bo", "type": "note", "payload": "a text of more than ten bytes"}
        found = []
        for _ in range(2):
            found.append(Asking(hub, "ada", body=long))
            await steps()
        assert len(hub.under_log) == 2
        hub.settle_held()
        await steps()
        found.append(Asking(hub, "cy", body=long))
        await steps()
        assert not hub.under_log
        assert {one.answers[0][1]["reason"] for one in found} == {"mailbox_full"}

    run(test)


def test_a_record_that_kafka_refuses_for_its_size_is_recorded_as_a_refusal() -> None:
    async def test(hub: HeldHub) -> None:
        asked = Asking(hub, "ada")
        hub.settle_held(error=ApiError(413, TOO_LARGE, "Kafka takes no record of this size"))
        await steps()
        assert asked.statuses == [413]
        assert [one[0] for one in hub.refused] == [TOO_LARGE]

    run(test)


def test_an_error_that_nobody_expected_is_told_without_its_text() -> None:
    async def test(hub: HeldHub) -> None:
        asked = Asking(hub, "ada")
        hub.settle_held(error=KeyError("a secret"))
        await steps()
        assert asked.statuses == [500] and "secret" not in str(asked.answers)

    run(test)


def test_a_long_answer_a_long_body_and_a_client_that_left_are_not_for_the_engine() -> None:
    async def test(hub: HeldHub) -> None:
        long = Asking(hub, "ada", body={"recipient": "bo", "type": "note", "payload": "x" * 1000})
        assert long.passed_on == 1 and not hub.under_log
        Asking(hub, "cy")
        hub.settle_held()
        await steps()
        gone = Asking(hub, "bo", TAKE, is_there=False)
        assert gone.passed_on == 1 and not hub.under_log
        counted = hub.metrics.text().decode()
        for result, times in (("passed_on", 2), ("answered", 1)):
            assert f'trunkline_direct_requests_total{{result="{result}"}} {times}.0' in counted
        await steps()
        assert Asking(hub, "bo", TAKE, query=b"lease=60", is_there=False).passed_on == 0
        hub.under_log.clear()
        hub.gate.body_limit_bytes = 100_000
        for _ in range(2):
            await steps()
            Asking(hub, "cy", body={"recipient": "bo", "type": "note", "payload": "x" * 20_000})
            hub.settle_held()
        await steps()
        assert Asking(hub, "bo", TAKE).passed_on == 1 and not hub.under_log

    run(test)


def test_messages_that_another_reader_was_faster_to_take_are_asked_for_anew() -> None:
    async def test(hub: HeldHub) -> None:
        Asking(hub, "ada")
        hub.settle_held()
        taking = Asking(hub, "bo", TAKE)
        other = claim_record("default", "bo", "another", 1, bytes_most=1000, door="http", principal="bo")
        assert hub.add(other).verdict == "accepted"
        hub.settle_held()
        assert taking.passed_on == 1 and not taking.answers

    run(test)
