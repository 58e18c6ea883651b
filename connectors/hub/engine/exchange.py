"""A usual request on its connection, as a door hands it to its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from connectors.hub.engine.operation import Asked
from connectors.hub.services.mailbox_waits import MailboxWait
from connectors.hub.serving.policy import Caller


class Connection(Protocol):
    """The connection of a request."""

    def is_heard(self) -> bool:
        """Return whether the client was there a moment ago."""

    def has_left(self) -> bool:
        """Return whether the client has ended the connection."""

    def admits(self, principal: str, *, is_operator: bool) -> bool:
        """Count the connection as one of a principal. Return False if the principal has too many."""

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Send the answer: its status, the lines of its headers, and its body."""

    async def answers(self) -> bool:
        """Return whether the client is there, after a probe of its machine."""

    async def sent(self) -> None:
        """Wait until most of the answer has left, or the connection has ended."""

    def pass_on(self, exchange: Exchange) -> None:
        """Let the careful path answer."""


class Exchange:
    """A usual request on its connection.

    Attributes:
        connection: Where it came from.
        operation: The operation that it asks for, in the form that the door's engine has found it.
        request: Its bytes.
        path: The values of the path's parameters, in their order.
        headers: Its headers by their names in lower case.
        query: Its query, without the question mark.
        body: Its body.
        caller: Its sender, once it is admitted.
        asked: Its validated values, once there are any.
        began: The time at which it came, by the monotonic clock.
        wait: Its wait for messages, once it has waited.
        timer: The end of its present wait. None: it does not wait now.
        is_probed: Whether the client must answer a probe after the wait.
    """

    __slots__ = (
        "asked",
        "began",
        "body",
        "caller",
        "connection",
        "headers",
        "is_probed",
        "operation",
        "path",
        "query",
        "request",
        "timer",
        "wait",
    )

    caller: Caller
    asked: Asked

    def __init__(
        self,
        connection: Connection,
        operation: Any,
        request: bytes,
        path: Sequence[bytes],
        headers: dict[bytes, bytes],
        query: bytes,
        body: bytes,
    ) -> None:
        self.connection = connection
        self.operation = operation
        self.request = request
        self.path = path
        self.headers = headers
        self.query = query
        self.body = body
        self.began = time.monotonic()
        self.wait: MailboxWait | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_probed = False


class DoorEngine(Protocol):
    """Serves usual requests of a door in the protocol's own callback."""

    def find(self, request_line: bytes) -> tuple[Any, Sequence[bytes], bytes]:
        """Return the operation of a request line, the values of the path's parameters, and the query.

        The operation is None for a request line that the careful path must read.
        """

    def admit(self, exchange: Exchange) -> bool:
        """Find the caller of a request and check its right. Return False if the careful path must do that."""

    def begin(self, exchange: Exchange) -> None:
        """Begin an admitted request when it is its principal's turn."""

    def leave(self, exchange: Exchange) -> None:
        """End a request that waits for messages, because its connection has ended. Another one goes on."""
