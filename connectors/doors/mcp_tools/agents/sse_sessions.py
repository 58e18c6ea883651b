"""The SSE connections of agents (AM-01), with a limit per agent.

A connection ends when its agent has no key any more, and when its client does not read. **Delivers** the
answers to the messages that the same agent posts, on the connection that the agent opened. **Loses** the
answers of a connection that is cut off. The calls have had their effect; the agent can repeat them with the
same idempotency key.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import structlog
from mcp.server.lowlevel import Server
from mcp.server.sse import SseServerTransport
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from connectors.doors.mcp_tools.agents.agent_keys import AgentKeys
from connectors.doors.mcp_tools.agents.signed_requests import DOOR, IS_EVENT, IS_GONE, PRINCIPAL
from connectors.hub.serving.answers import BUSY, crowded, error_response
from connectors.hub.serving.bounded_http import ABORT, peer_is_gone
from connectors.hub.serving.metrics import Metrics
from connectors.hub.serving.shares import ByteBudget, Rooms

log = structlog.stdlib.get_logger(__name__)

# An agent needs one connection, and a second one while it has not noticed the loss of the first.
_PER_AGENT: Final = 8
# The most answers that wait for a reader. Each may be long, so a client that does not read gets no more.
_UNSENT: Final = 32
_SEND_S: Final = 10.0
_END_S: Final = 1.0
_CHECK_S: Final = 1.0
_SESSION: Final = re.compile(rb"session_id=([0-9a-f]{32})")


class SseSessions:
    """The SSE connections of all agents, as an ASGI application that serves one connection for each request.

    `post` is the ASGI application for the messages that agents post to their connections.
    """

    def __init__(
        self,
        server: Server[Any],
        keys: AgentKeys,
        messages_path: str,
        security: TransportSecuritySettings,
        body_bytes: int,
        metrics: Metrics,
        budget: ByteBudget,
    ) -> None:
        self._server = server
        self._keys = keys
        self._transport = SseServerTransport(messages_path, security, body_bytes)
        self._security = TransportSecurityMiddleware(security)
        self._open: Counter[str] = Counter()
        self._unsent: Counter[str] = Counter()
        self._metrics = metrics
        self._budget = budget
        # By agent: the bytes of its calls whose answers were not sent yet.
        self._rooms: dict[str, set[Rooms]] = {}
        # By the id of a session: the ASGI scope of its event stream, which gets the answers.
        self._scopes: dict[str, Scope] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one agent's event stream until the client disconnects or stops reading, or its key is removed.

        An agent may have eight connections. A further one is answered with 429.
        """
        # The transport checks this too, but raises an error that nothing handles.
        refused = await self._security.validate_request(Request(scope), is_post=False)
        agent = scope[PRINCIPAL]
        if refused is None and self._open[agent] >= _PER_AGENT:
            refused = _busy(f"an agent has at most {_PER_AGENT} connections at {scope['path']}")
        if refused is not None:
            await refused(scope, receive, send)
            return
        self._open[agent] += 1
        self._metrics.readers(DOOR, 1)
        bounded = _BoundedSend(scope, send, self._scopes)
        try:
            await self._serve(agent, scope, receive, bounded)
        finally:
            self._scopes.pop(bounded.session_id, None)
            self._open -= Counter([agent])
            self._metrics.readers(DOOR, -1)
            if not self._open[agent]:
                for rooms in list(self._rooms.pop(agent, ())):
                    rooms.close()

    async def post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept an MCP message for an event stream that the same agent has opened.

        This method is an ASGI application, for signed requests only. The answer to the message comes on the
        stream. While 32 answers wait to be read, a further message is answered with 429. A message for an
        unknown stream is answered with an error of the `mcp` library.
        """
        if self._unsent[scope[PRINCIPAL]] >= _UNSENT:
            await _busy("read the answers first")(scope, receive, send)
            return
        # The call runs in the context of this request, and its answer is sent after that of this request.
        self._budget.begin_request(self._rooms.setdefault(scope[PRINCIPAL], set()))
        IS_EVENT.set(True)
        IS_GONE.set(partial(self._is_gone, Request(scope).query_params.get("session_id")))
        # The stream may end after the 202. Otherwise the error would end the posting connection, too.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._transport.handle_post_message(scope, receive, send)

    async def _serve(self, agent: str, scope: Scope, receive: Receive, send: _BoundedSend) -> None:
        async with anyio.create_task_group() as tasks:
            send.on_silence = partial(self._cut_off, tasks.cancel_scope)
            tasks.start_soon(self._end_with_agent, agent, tasks.cancel_scope)
            async with self._transport.connect_sse(scope, receive, send) as (reads, writes):
                answers: Any = _Answers(writes, agent, self._unsent, self._budget)
                await self._server.run(reads, answers, self._server.create_initialization_options())
            tasks.cancel_scope.cancel()
        await send.end()

    async def _is_gone(self, session_id: str | None) -> bool:
        scope = self._scopes.get(session_id or "")
        return scope is not None and await peer_is_gone(scope)

    def _cut_off(self, connection: anyio.CancelScope) -> None:
        self._metrics.dropped(DOOR)
        connection.cancel()

    async def _end_with_agent(self, agent: str, connection: anyio.CancelScope) -> None:
        while self._keys.is_registered(agent):
            await anyio.sleep(_CHECK_S)
        log.info("sse_closed", agent=agent, why="the agent has no key any more")
        connection.cancel()


class _BoundedSend:
    """The connection's `send`, which cuts off a client that does not read for `_SEND_S`.

    It also notes the connection's scope in `scopes` by the id of the session, which the transport sends first.
    """

    def __init__(self, scope: Scope, send: Send, scopes: dict[str, Scope]) -> None:
        self._scope = scope
        self._scopes = scopes
        self.session_id = ""
        self._abort = scope.get(ABORT)
        self._send = send
        self._is_open = False
        self.on_silence: Any = None

    async def __call__(self, message: Message) -> None:
        self._is_open = message["type"] == "http.response.start" or message.get("more_body", False)
        if not self.session_id and (found := _SESSION.search(message.get("body", b""))):
            self.session_id = found.group(1).decode()
            self._scopes[self.session_id] = self._scope
        with anyio.move_on_after(_SEND_S) as waiting:
            await self._send(message)
        if waiting.cancelled_caught:
            self._is_open = False
            if self._abort is not None:
                self._abort()
            log.info("sse_cut_off", why=f"nothing was read for {_SEND_S:g} s")
            self.on_silence()

    async def end(self) -> None:
        """Complete the response if it has begun and not ended."""
        if not self._is_open:
            return
        with anyio.move_on_after(_END_S) as waiting:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        if waiting.cancelled_caught and self._abort is not None:
            self._abort()


class _Answers:
    """The transport's stream of answers, which counts the answers that wait to be sent.

    It gives back the bytes that the call of an answer has reserved (LM-12).
    """

    def __init__(self, stream: Any, agent: str, unsent: Counter[str], budget: ByteBudget) -> None:
        self._budget = budget
        self._stream = stream
        self._agent = agent
        self._unsent = unsent

    async def send(self, item: Any) -> None:
        """Send one answer after the one before it was sent."""
        self._unsent[self._agent] += 1
        try:
            await self._stream.send(item)
        finally:
            self._unsent -= Counter([self._agent])
            self._budget.release()

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    async def __aenter__(self) -> _Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _busy(why: str) -> Any:
    return error_response(429, BUSY, why, dict(crowded(why).headers or {}))
