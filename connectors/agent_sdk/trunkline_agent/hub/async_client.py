"""The async client of the hub: runs plans over a pool of kept connections, within one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self, TypeVar

from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.hub.answer_errors import RefusalOf, error_of
from trunkline_agent.hub.async_connection import AsyncConnection
from trunkline_agent.hub.http_exchange import EventParser, ProtocolFault, RequestHead, ServerEvent
from trunkline_agent.hub.hub_address import (
    ANSWER_TIMEOUT_S,
    BUSY_MOST,
    CONNECT_TIMEOUT_S,
    IDLE_MOST,
    SILENCE_S,
    HubAddress,
)
from trunkline_agent.hub.plans import Answer, Lost, Pause, Plan, Request

if TYPE_CHECKING:
    import os

_T = TypeVar("_T")


class AsyncHubClient:
    """A client of one hub, for any number of tasks of one event loop. Use it with `async with`, or `close` it.

    The constructor makes no request. A proxy is used as the variables of the environment say: see `proxy_of`.

    Args:
        access: The address and the token.
        ca_certs: A file with the certificate authority that the hub's TLS must have. None: the authorities that
            this machine trusts.
        connect_timeout_s: How long to wait for a connection, its TLS handshake included.
        answer_timeout_s: How long to wait for a whole answer, beside the `wait_s` of its request.

    Raises:
        UsageError: The address or the token is not valid, or the file cannot be read.
    """

    def __init__(
        self,
        access: HubAccess,
        ca_certs: str | os.PathLike[str] | None = None,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.address = HubAddress.of(access.url)
        self._head = RequestHead(self.address, access.token)
        self._trust = self.address.trust(None if ca_certs is None else str(ca_certs))
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._idle: list[AsyncConnection] = []
        self._busy: set[AsyncConnection] = set()
        self._places = asyncio.Semaphore(BUSY_MOST)
        self._pausing: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def run(self, plan: Plan[_T]) -> _T:
        """Run a plan to its end and return its result. Raises the errors of the plan.

        Cancellation ends a wait at once, and so does `close`.
        """
        result: Any = None
        try:
            while True:
                step = plan.send(result)
                if isinstance(step, Request):
                    result = await self._request(step)
                else:
                    await self._pause(step)
                    result = None
        except StopIteration as end:
            found: _T = end.value
            return found
        finally:
            plan.close()

    async def parts(
        self, request: Request, silence_s: float = SILENCE_S, refusal_of: RefusalOf = error_of
    ) -> AsyncIterator[bytes]:
        """Send a request once, and yield the parts of its answer's body as they come, to its end.

        The first part is empty: the answer has begun. Close the iterator (`aclose`) to end the stream earlier.
        The request has a connection of its own.

        Args:
            request: The request.
            silence_s: How long to wait for the next bytes.
            refusal_of: Returns the error of an answer without success: its status, headers and body.

        Raises:
            BackboneUnreachable: No connection, it was lost, or it was silent for too long.
            TrunklineError: The error of the answer's status, as `refusal_of` returns it.
        """
        connection = self._taken(AsyncConnection(self._head))
        http = connection.http
        try:
            await connection.open(self.address, self._trust, self._connect_timeout_s)
            self._check_open()
            is_complete = await connection.begin_stream(request, self._answer_timeout_s + request.wait_s)
            while http.status is None or (http.status >= 300 and not is_complete):
                is_complete = await connection.more(silence_s)
            if http.status >= 300:
                answer = http.answer()
                raise refusal_of(answer.status, answer.headers, answer.body)
            yield b""
            while True:
                if found := http.take_parts():
                    yield found
                if is_complete:
                    return
                is_complete = await connection.more(silence_s)
        except (OSError, ProtocolFault) as error:
            raise self._lost(error) from None
        finally:
            self._ended(connection, is_reusable=False)

    async def events(self, request: Request, silence_s: float = SILENCE_S) -> AsyncIterator[ServerEvent]:
        """Send a request once, and yield the server-sent events of its answer as they come.

        It ends when the hub ends the stream. To go on, send a request with the header `Last-Event-ID`. See
        `parts` for the arguments and errors.
        """
        parser = EventParser()
        parts = self.parts(request, silence_s)
        try:
            async for part in parts:
                for event in parser.feed(part):
                    yield event
        finally:
            await parts.aclose()  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Close all connections. A plan that runs in another task ends with TrunklineError."""
        self._is_closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        for pausing in self._pausing:
            if not pausing.done():
                pausing.set_result(None)
        # The event loop closes the sockets in its next step.
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _pause(self, step: Pause) -> None:
        self._check_open()
        loop = asyncio.get_running_loop()
        pausing: asyncio.Future[None] = loop.create_future()
        self._pausing.add(pausing)
        timer = loop.call_later(max(0.0, step.seconds), _end_pause, pausing)
        try:
            await pausing
        finally:
            timer.cancel()
            self._pausing.discard(pausing)
        self._check_open()

    async def _request(self, request: Request) -> Answer | Lost:
        if request.wait_s:
            return await self._attempt(request)
        async with self._places:
            return await self._attempt(request)

    async def _attempt(self, request: Request) -> Answer | Lost:
        """Send a request once, or again at once if it met a kept connection that had ended."""
        until = time.monotonic() + self._connect_timeout_s + self._answer_timeout_s + request.wait_s
        while True:
            connection, is_kept, was_sent, is_reusable = self._any_connection(), True, False, False
            try:
                if not connection.is_alive:
                    is_kept = False
                    await connection.open(self.address, self._trust, self._connect_timeout_s)
                    self._check_open()
                was_sent = True
                answer = await connection.answer(request, until - time.monotonic())
                is_reusable = connection.http.reuse()
                return answer
            except (OSError, ProtocolFault) as error:
                self._check_open()
                has_ended = is_kept and connection.http.is_untouched and not isinstance(error, TimeoutError)
                if not (has_ended and request.is_repeatable):
                    return Lost(self.address.explained(error), was_sent, str(error))
            finally:
                self._ended(connection, is_reusable)

    def _any_connection(self) -> AsyncConnection:
        """Return a kept connection that is alive, else a new one that is not open yet."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_alive:
                return self._taken(connection)
            connection.close()
        return self._taken(AsyncConnection(self._head))

    def _taken(self, connection: AsyncConnection) -> AsyncConnection:
        self._check_open()
        self._busy.add(connection)
        return connection

    def _ended(self, connection: AsyncConnection, is_reusable: bool) -> None:
        self._busy.discard(connection)
        if is_reusable and connection.is_alive and len(self._idle) < IDLE_MOST and not self._is_closed:
            self._idle.append(connection)
        else:
            connection.close()

    def _lost(self, error: Exception) -> TrunklineError:
        self._check_open()
        return BackboneUnreachable(self.address.explained(error))

    def _check_open(self) -> None:
        if self._is_closed:
            raise TrunklineError(f"the client of {self.address.url} is closed", reason="closed")


def _end_pause(pausing: asyncio.Future[None]) -> None:
    if not pausing.done():
        pausing.set_result(None)
