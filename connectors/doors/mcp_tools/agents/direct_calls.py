"""Serves usual calls of tools over streamable HTTP in the protocol's own callback (decision 0055).

A call is usual if its headers have the forms that our clients send, its signature is right, and its body calls
one of some tools with valid arguments. All others go, with their bytes, to `SignedRequests`, before anything is
recorded. After its signature is recorded, a call cannot go there any more. If it is unusual in another way, for
example by a blob, the tool's own coroutine serves it, and the answer is sent here.

`tests/matrix` holds the answers and records of both ways equal.

`LeanCalls` serves calls that come by `SignedRequests` without the transport of the `mcp` library, which makes a
transport, a session and two tasks for each stateless request. The document that `SignedRequests` has decoded is
the call. The library serves everything else: other methods, the protocol from 2026-07-28 on, calls with
`_meta`, and each request that it would refuse. So the library words all refusals of that kind.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson
from mcp import types
from mcp.server.streamable_http import check_accept_headers
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from connectors.doors.mcp_tools.agents.mcp_tool import result_text
from connectors.doors.mcp_tools.agents.operation_tools import (
    ARGUMENTS,
    ONLY_READS,
    PlannedTool,
    ToolCall,
    agent_caller,
)
from connectors.doors.mcp_tools.agents.signed_requests import (
    DOCUMENT,
    DOOR,
    PRINCIPAL,
    SIGNED_HEADERS,
    CallSignatures,
    body_limit_bytes,
    called_record,
    check_noted,
)
from connectors.hub.engine.direct_http import Exchange
from connectors.hub.engine.engine import outcome, settle_then
from connectors.hub.engine.operation import Answer, Unusual
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.strict_request import HostNames, name_and_port
from trunkline_agent.mcp.signing import signature_bytes
from trunkline_agent.wire.strict_json import decode

_VERSION: Final = b"mcp-protocol-version"
_ONCE: Final = frozenset({b"host", b"origin", b"accept", b"content-type", _VERSION})
_CALL: Final = frozenset({"jsonrpc", "id", "method", "params"})
_PARAMS: Final = frozenset({"name", "arguments"})

Call = Callable[[str, types.CallToolRequestParams], Awaitable[types.CallToolResult]]
"""Calls a tool for an agent, given by its name, and returns the result. It must not raise."""


class LeanCalls:
    """An ASGI application for signed POST requests, which answers usual calls and passes the others on.

    Args:
        app: The library's application for stateless requests.
        call: Calls a tool.
        security: The allowed Host and Origin headers.
    """

    def __init__(self, app: ASGIApp, call: Call, security: TransportSecuritySettings) -> None:
        self._app = app
        self._call = call
        self._security = TransportSecurityMiddleware(security)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call of a tool, or pass the request on."""
        document = scope[DOCUMENT]
        if not (_is_call(document) and await self._is_usual(Request(scope))):
            await self._app(scope, receive, send)
            return
        params = types.CallToolRequestParams.model_validate(document["params"], by_name=False)
        found = await self._call(scope[PRINCIPAL], params)
        answer = _call_answer(document["id"], found)
        await Response(answer, headers={"Content-Type": "application/json"})(scope, receive, send)

    async def _is_usual(self, request: Request) -> bool:
        """Return whether the library would accept the headers, and answer in the form of this class."""
        names = [name for name, _ in request.scope["headers"] if name in _ONCE]
        version = request.headers.get(_VERSION.decode())
        return (
            len(set(names)) == len(names)
            and (version is None or version in HANDSHAKE_PROTOCOL_VERSIONS)
            and request.headers.get("content-type") == "application/json"
            and check_accept_headers(request)[0]
            and await self._security.validate_request(request, is_post=True) is None
        )


def _call_answer(number: Any, found: types.CallToolResult) -> bytes:
    """Return the answer to a call, whose id is `number`."""
    # In the order of the library's fields. All content of our tools is text.
    result = {
        "content": [{"text": getattr(one, "text", ""), "type": "text"} for one in found.content],
        "isError": bool(found.is_error),
        "structuredContent": found.structured_content,
    }
    return orjson.dumps({"jsonrpc": "2.0", "id": number, "result": result})


def _is_call(document: Any) -> bool:
    """Return whether a decoded body is one call of a tool, with nothing but its name and arguments."""
    if type(document) is not dict or document.keys() != _CALL or document["jsonrpc"] != "2.0":
        return False
    params = document["params"]
    return (
        document["method"] == "tools/call"
        and type(document["id"]) in (int, str)
        and type(params) is dict
        and params.keys() <= _PARAMS
        and type(params.get("name")) is str
        and type(params.get("arguments")) in (dict, type(None))
    )


_POST: Final = "POST"
_ACCEPT: Final = frozenset((b"application/json, text/event-stream", b"application/json", b"*/*"))
_VERSIONS: Final = frozenset((None, *(one.encode() for one in HANDSHAKE_PROTOCOL_VERSIONS)))
_SIGNED: Final = tuple(one.lower().encode() for one in SIGNED_HEADERS)
_HEAD: Final = b"content-type: application/json\r\ncontent-length: %d\r\n"


class _Call(ToolCall):
    """A usual call: its tool, the arguments as they came, the id of the request, and the signature."""

    __slots__ = ("arguments", "name", "number", "signature", "tool")

    arguments: dict[str, Any] | None
    name: str
    number: int | str
    signature: bytes
    tool: PlannedTool


class DirectCalls:
    """Answers usual calls at once. Not thread-safe: for the event loop.

    Args:
        hub: The hub.
        signatures: The check of signatures.
        names: The host names under which the door answers.
        path: The path of the door.
        tools: The tools, by name.
        call: Calls a tool for an agent in a coroutine, and returns the result. It does not raise.
        fault: Returns the result of an agent's call of a tool that has raised an error.
    """

    def __init__(
        self,
        hub: Hub,
        signatures: CallSignatures,
        names: HostNames,
        path: str,
        tools: Mapping[str, PlannedTool],
        call: Callable[[str, types.CallToolRequestParams], Awaitable[types.CallToolResult]],
        fault: Callable[[str, str, Exception], Awaitable[types.CallToolResult]],
    ) -> None:
        self._hub = hub
        self._signatures = signatures
        self._names = names
        self._path = path
        self._line = f"{_POST} {path} HTTP/1.1".encode()
        self._tools = tools
        # Whether a body may call one of the tools. The signature of another one is checked once, later.
        self._may_call = re.compile(rb'"name": ?"(?:%b)"' % "|".join(tools).encode()).search
        self._call = call
        self._fault = fault
        self._limit_bytes = body_limit_bytes(hub.settings.limits.payload_bytes)
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, request_line: bytes) -> tuple[Any, Sequence[bytes], bytes]:
        """Return True for a call of a tool, and no parameters of the path and no query."""
        return (True if request_line == self._line else None), (), b""

    def admit(self, exchange: Exchange) -> bool:
        """Check headers and signature of a request. Return False if the careful path must do that."""
        headers, body = exchange.headers, exchange.body
        if (
            headers.get(b"content-type") != b"application/json"
            or headers.get(b"accept") not in _ACCEPT
            or headers.get(b"mcp-protocol-version") not in _VERSIONS
            or b"origin" in headers
            or name_and_port(headers[b"host"].decode("ascii"))[0] not in self._names
            or len(body) > self._limit_bytes
            or not self._may_call(body)
        ):
            return False
        signed = [headers[name].decode("ascii") for name in _SIGNED if name in headers]
        if len(signed) < len(_SIGNED):
            return False
        try:
            self._signatures.check(body, *signed)
        except ApiError:
            return False
        exchange.caller = agent_caller(signed[0])
        return exchange.connection.admits(f"{DOOR}/{signed[0]}", is_operator=False)

    def begin(self, exchange: Exchange) -> None:
        """Begin an admitted call when it is its agent's turn."""
        self._hub.turns.begin(f"{DOOR}/{exchange.caller.principal}", partial(self._start, exchange))

    def leave(self, exchange: Exchange) -> None:
        """Do nothing, because no usual call waits."""

    def _start(self, exchange: Exchange) -> None:
        try:
            call = self._asked(exchange)
        except Exception:  # noqa: BLE001  nothing is recorded yet, and the careful path words all refusals
            self._pass_on(exchange)
            return
        if call.name in ONLY_READS:
            self._carry_out(exchange, call)
        else:
            self._hub.under_way.begin(exchange.caller.principal, partial(self._note_call, exchange, call))

    def _asked(self, exchange: Exchange) -> _Call:
        """Return the call of a request. Raises an error if it is not usual."""
        document, _ = decode(exchange.body)
        if not _is_call(document):
            raise Unusual
        orjson.dumps(document["id"])  # raises for a number that no answer can have
        name, arguments = document["params"]["name"], document["params"].get("arguments")
        tool = self._tools[name]
        call = _Call(exchange.caller.principal, ARGUMENTS[name].model_validate(arguments or {}))
        call.number, call.tool, call.name, call.arguments = document["id"], tool, name, arguments
        if not tool.is_usual(call):
            raise Unusual
        call.signature = signature_bytes(exchange.headers[_SIGNED[2]].decode("ascii")) or b""
        return call

    def _note_call(self, exchange: Exchange, call: _Call) -> None:
        record = called_record(exchange.caller.principal, call.signature, call.name)
        self._hub.appender.settle_then(record, partial(self._noted, exchange, call))

    def _noted(self, exchange: Exchange, call: _Call, settled: SettledRecord | Exception) -> None:
        self._hub.under_way.end(exchange.caller.principal)
        try:
            check_noted(settled)
        except ApiError as error:
            self._refuse(exchange, self._signatures.refusal(error, exchange.caller.principal))
        except Exception as error:  # noqa: BLE001  told to the client
            self._failed(exchange, call, error)
        else:
            self._carry_out(exchange, call)

    def _carry_out(self, exchange: Exchange, call: _Call) -> None:
        try:
            records = call.tool.plan(call)
        except Exception as error:  # noqa: BLE001  told to the client
            self._failed(exchange, call, error)
        else:
            settle_then(call.tool, call, records, partial(self._end, exchange, call))

    def _end(self, exchange: Exchange, call: _Call) -> None:
        try:
            found = outcome(call.tool, call)
            if not isinstance(found, Answer):
                self._run(self._await(exchange, call, found))
                return
            answer = _encoded(call, found)
        except Exception as error:  # noqa: BLE001  told to the client
            self._failed(exchange, call, error)
        else:
            self._done(exchange, call, answer)

    async def _await(self, exchange: Exchange, call: _Call, found: Awaitable[Answer]) -> None:
        try:
            answer = _encoded(call, await found)
        except Exception as error:  # noqa: BLE001  told to the client
            await self._refused(exchange, call, error)
        else:
            self._done(exchange, call, answer)

    def _done(self, exchange: Exchange, call: _Call, answer: bytes) -> None:
        self._hub.metrics.called(call.name, "ok")
        self._answer(exchange, answer, "answered")

    def _failed(self, exchange: Exchange, call: _Call, error: Exception) -> None:
        """Let a coroutine carry the call out, or word the error."""
        if isinstance(error, Unusual):
            if call.name in ONLY_READS:
                self._pass_on(exchange)
            else:
                self._run(self._carried_out(exchange, call))
        else:
            self._run(self._refused(exchange, call, error))

    async def _carried_out(self, exchange: Exchange, call: _Call) -> None:
        rooms = self._hub.answer_memory.begin_request()
        try:
            params = types.CallToolRequestParams(name=call.name, arguments=call.arguments)
            body = _call_answer(call.number, await self._call(exchange.caller.principal, params))
            rooms.resize(len(body))
            self._answer(exchange, body, "answered")
            await exchange.connection.sent()
        finally:
            rooms.close()

    async def _refused(self, exchange: Exchange, call: _Call, error: Exception) -> None:
        found = await self._fault(exchange.caller.principal, call.name, error)
        said: Any = found.structured_content
        self._hub.metrics.called(call.name, said["reason"])
        self._answer(exchange, _call_answer(call.number, found), "refused")

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer(self, exchange: Exchange, body: bytes, result: str) -> None:
        exchange.connection.answer(200, _HEAD % len(body), body)
        self._note(exchange, 200, result, exchange.caller.principal)

    def _refuse(self, exchange: Exchange, response: Response) -> None:
        head = b"".join([b"%b: %b\r\n" % one for one in response.raw_headers])
        exchange.connection.answer(response.status_code, head, bytes(response.body))
        # As of every request that `SignedRequests` refuses.
        self._note(exchange, response.status_code, "refused", None)

    def _pass_on(self, exchange: Exchange) -> None:
        self._hub.metrics.direct("passed_on")
        exchange.connection.pass_on(exchange)

    def _note(self, exchange: Exchange, status: int, result: str, agent: str | None) -> None:
        self._hub.metrics.direct(result)
        seconds = time.monotonic() - exchange.began
        self._hub.metrics.answered(_POST, self._path, status, seconds)
        self._hub.request_lines.add(_POST, self._path, status, seconds, agent)


def _encoded(call: _Call, found: Answer) -> bytes:
    text = {"text": result_text(found.document), "type": "text"}
    result = {"content": [text], "isError": False, "structuredContent": found.document}
    return orjson.dumps({"jsonrpc": "2.0", "id": call.number, "result": result})
