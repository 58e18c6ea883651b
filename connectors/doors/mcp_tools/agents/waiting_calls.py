"""Calls of tools that wait, over streamable HTTP (DL-09): they end with their client, and are kept alive.

The answer is one JSON document, not a stream of events. The official client reads at most 1 MiB of an event,
and a message may be as long. A client that accepts only JSON gets the answer, too. For proxies and clients with
short limits, the answer begins after `PROGRESS_S` with its head and a space, which JSON allows before a
document. After each further `PROGRESS_S` another space follows.

A host that ends a call after some time without a notification asks for progress (`_meta.progressToken`). Then
an answer that takes longer than `PROGRESS_S` is a stream of events: `notifications/progress` after each
`PROGRESS_S`, and at last the document. So its contents are bounded as at `/sse` (`within_event`).

A client cancels a call by closing its connection (MCP 2026-07-28, streamable HTTP). The call is then cancelled
at once, so that no message is leased to a client that has gone. At `/sse` the `mcp` library does both: it pings
each stream, and cancels calls at `notifications/cancelled` and at the end of the stream.

A call also ends when its agent's last key is removed. An agent that joins later by the same name has the same
mailbox, and its messages are not for the earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
import orjson
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from connectors.doors.mcp_tools.agents.agent_keys import AgentKeys
from connectors.doors.mcp_tools.agents.mcp_tool import PROGRESS_S
from connectors.doors.mcp_tools.agents.signed_requests import DOCUMENT, IS_EVENT, IS_GONE, PRINCIPAL, TOOL
from connectors.hub.serving.answers import error_response
from connectors.hub.serving.bounded_http import peer_is_gone
from connectors.hub.serving.strict_request import replayed
from trunkline_agent.wire.verdicts import UNAUTHORIZED

_BEGUN: Final = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json")],
}
_EVENTS_BEGUN: Final = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")],
}
_EVENT: Final = b"event: message\ndata: "
_EVENT_END: Final = b"\n\n"
_PING: Final = {"type": "http.response.body", "body": b" ", "more_body": True}


class WaitingCalls:
    """An ASGI application that passes requests on, and cares for those that call a tool that waits.

    Such a call is cancelled when its client disconnects, and answered with 403 when its agent has no key any
    more. While it waits, the client gets a space every `ping_s` seconds. No call occupies a thread.

    Args:
        app: The application that serves MCP requests and answers each with one JSON document.
        waits: The names of the tools that wait.
        keys: The public keys of the agents.
        ping_s: The time between two pings in seconds.
    """

    def __init__(
        self, app: ASGIApp, waits: Container[str], keys: AgentKeys, ping_s: float = PROGRESS_S
    ) -> None:
        self._app = app
        self._waits = waits
        self._keys = keys
        self._ping_s = ping_s
        self._loop: asyncio.AbstractEventLoop | None = None
        # The calls that wait, by agent.
        self._calls: dict[str, set[_Call]] = {}
        keys.on_removed(self._end_calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on. Returns without an answer if the client has disconnected during a wait."""
        if scope.get(TOOL) not in self._waits:
            await self._app(scope, receive, send)
            return
        self._loop = asyncio.get_running_loop()
        # The whole body: `SignedRequests` has read it.
        body = (await receive())["body"]
        token = _progress_token(scope)
        IS_EVENT.set(token is not None)
        agent, call, answer = scope[PRINCIPAL], _Call(), _PingedAnswer(send, token)
        self._calls.setdefault(agent, set()).add(call)
        IS_GONE.set(partial(peer_is_gone, scope))
        try:
            # The key may have been removed after the signature was checked.
            if self._keys.is_registered(agent):
                await self._serve(scope, body, receive, call, answer)
            else:
                call.is_refused = True
        finally:
            self._calls[agent].discard(call)
            if not self._calls[agent]:
                del self._calls[agent]
        if call.is_refused and not answer.is_over:
            refusal = error_response(403, UNAUTHORIZED, "this agent has no key any more")
            await refusal(scope, receive, answer.send)

    async def _serve(
        self, scope: Scope, body: bytes, receive: Receive, call: _Call, answer: _PingedAnswer
    ) -> None:
        async with anyio.create_task_group() as tasks:
            call.scope = tasks.cancel_scope
            tasks.start_soon(_end_with_client, receive, tasks.cancel_scope)
            tasks.start_soon(self._ping, answer)
            await self._app(scope, replayed(body, receive), answer.send)
            tasks.cancel_scope.cancel()

    def _end_calls(self, agent: str) -> None:
        """End the calls of an agent that has no key any more. The live view's thread calls it."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._refuse_calls, agent)

    def _refuse_calls(self, agent: str) -> None:
        for call in self._calls.get(agent, ()):
            call.is_refused = True
            call.scope.cancel()

    async def _ping(self, answer: _PingedAnswer) -> None:
        while True:
            await anyio.sleep(self._ping_s)
            await answer.ping()


class _Call:
    """A call that waits: the scope that ends it, and whether its agent has no key any more."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.is_refused = False


class _PingedAnswer:
    """The `send` of a request, which sends spaces or reports of progress before the application's own answer.

    `token` is the client's token for reports of progress; None: it wants none.
    """

    def __init__(self, send: Send, token: str | int | None) -> None:
        self._send = send
        self._token = token
        self._since = anyio.current_time()
        self._is_begun = False
        self._is_event_open = False
        self.is_over = False

    async def send(self, message: Message) -> None:
        """Send a message of the application; after a ping without its head, which the client has already."""
        self.is_over = True
        if not self._is_begun:
            await self._send(message)
        elif message["type"] != "http.response.start":
            await self._send(message if self._token is None else self._as_event(message))

    async def ping(self) -> None:
        """Send a sign of life, and the head before the first one. Does nothing when the application answers."""
        if self.is_over:
            return
        if not self._is_begun:
            self._is_begun = True
            await self._send(_BEGUN if self._token is None else _EVENTS_BEGUN)
        if not self.is_over:
            await self._send(_PING if self._token is None else self._progress(self._token))

    def _progress(self, token: str | int) -> Message:
        params = {"progressToken": token, "progress": round(anyio.current_time() - self._since, 3)}
        said = orjson.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
        return {"type": "http.response.body", "body": _EVENT + said + _EVENT_END, "more_body": True}

    def _as_event(self, message: Message) -> Message:
        """Return a part of the application's document, which is one line, as a part of an event."""
        body, more = message.get("body", b""), message.get("more_body", False)
        begin = b"" if self._is_event_open else _EVENT
        self._is_event_open = True
        return {**message, "body": begin + body + (b"" if more else _EVENT_END)}


def _progress_token(scope: Scope) -> str | int | None:
    """Return the client's token for reports of progress; None if it wants none, or accepts no event stream."""
    document = scope.get(DOCUMENT)
    accepted = b",".join(value for name, value in scope.get("headers", ()) if name == b"accept")
    if not isinstance(document, dict) or b"text/event-stream" not in accepted.lower():
        return None
    params = document.get("params")
    return progress_token_from_params(params if isinstance(params, dict) else None)


async def _end_with_client(receive: Receive, call: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call.cancel()
