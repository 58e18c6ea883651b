"""A hub for tests of the engine. Its requests come from no socket, and its log answers when a test says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from connectors.hub.engine.direct_http import Exchange
from connectors.hub.engine.engine import Engine
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.listeners import Listeners
from connectors.hub.serving.admission import Gate
from connectors.hub.serving.identities import Unidentified
from connectors.hub.serving.metrics import Metrics
from connectors.hub.serving.policy import Caller
from connectors.operations.every_operation import OPERATIONS
from connectors.operations.messages.message_operations import MESSAGES
from schemas.streams.principal.principals import OPERATOR
from schemas.wire.record import OutgoingRecord
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.schemas.hub_records import public_key

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
        operations = [one(self) for one in OPERATIONS if "operations.messages" in one.__module__]  # type: ignore[arg-type]
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
        self.answered, self.passed_on, self.head, self.is_operator = list[tuple[int, Any]](), 0, b"", False
        self.is_there, self.has_ended, self._has_place = is_there, False, has_place
        operation, path, _ = hub.engine.find(route + b" HTTP/1.1")
        assert operation is not None
        sent = {"recipient": "bo", "type": "note"} if body is None and route == SEND else body
        data = b"" if sent is None else json.dumps(sent).encode()
        headers = {b"authorization": b"Bearer " + name.encode(), b"content-type": b"application/json"}
        headers |= {} if key is None else {operation.key_header: key}
        self.exchange = Exchange(self, operation, data, path, headers, query, data)
        self.is_admitted = hub.engine.admit(self.exchange)
        if self.is_admitted:
            hub.engine.begin(self.exchange)

    def is_heard(self) -> bool:
        """As of the connection."""
        return self.is_there

    def has_left(self) -> bool:
        """As of the connection."""
        return self.has_ended

    async def answers(self) -> bool:
        """As of the connection."""
        return self.is_there

    def admits(self, principal: str, *, is_operator: bool) -> bool:
        """As of the connection."""
        self.is_operator = is_operator
        return self._has_place

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """As of the connection."""
        self.head = head
        self.answered.append((status, json.loads(body)))

    def pass_on(self, exchange: Exchange) -> None:
        """As of the connection."""
        self.passed_on += 1

    @property
    def statuses(self) -> list[int]:
        """The statuses of the answers, of which there is to be one."""
        return [status for status, _ in self.answered]


async def steps(count: int = 10) -> None:
    """Let the event loop make some steps."""
    for _ in range(count):
        await asyncio.sleep(0)


def run(test: Callable[[HeldHub], Awaitable[None]]) -> None:
    """Run a test on an event loop, with a hub of its own."""

    async def ran() -> None:
        await asyncio.wait_for(test(HeldHub()), 20)

    asyncio.run(ran())
