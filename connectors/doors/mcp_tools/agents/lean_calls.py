"""Serves usual calls of tools over streamable HTTP without the transport of the `mcp` library.

The library makes a transport, a session and two tasks for each stateless request, which takes most of a call's
time. Here the document that `SignedRequests` has decoded is the call, and the answer is written at once. The
library serves everything else: other methods, the protocol from 2026-07-28 on, calls with `_meta`, and each
request that it would refuse. So the library words all refusals of that kind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
from mcp import types
from mcp.server.streamable_http import check_accept_headers
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from connectors.doors.mcp_tools.agents.signed_requests import DOCUMENT, PRINCIPAL

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
        if not (is_call(document) and await self._is_usual(Request(scope))):
            await self._app(scope, receive, send)
            return
        params = types.CallToolRequestParams.model_validate(document["params"], by_name=False)
        found = await self._call(scope[PRINCIPAL], params)
        answer = call_answer(document["id"], found)
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


def call_answer(number: Any, found: types.CallToolResult) -> bytes:
    """Return the answer to a call, whose id is `number`."""
    # In the order of the library's fields. All content of our tools is text.
    result = {
        "content": [{"text": getattr(one, "text", ""), "type": "text"} for one in found.content],
        "isError": bool(found.is_error),
        "structuredContent": found.structured_content,
    }
    return orjson.dumps({"jsonrpc": "2.0", "id": number, "result": result})


def is_call(document: Any) -> bool:
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
