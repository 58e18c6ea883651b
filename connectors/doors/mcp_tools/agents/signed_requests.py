"""The middleware of the agent MCP server that passes on only requests that an agent has signed (AM-02).

It checks the raw body before any other code. **Refused**: missing, unknown, wrong or old signatures (403), a
signature that is used again for a call that changes something (403), a body over the limit (413), and a body
that is not JSON by CM-02 (400). **Recorded**: each refusal, as `request.refused`; each call that changes
something, as `agent.called`, before it is carried out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from connectors.doors.mcp_tools.agents.agent_keys import AgentKeys
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import INTERNAL, ApiError, error_response, malformed, unavailable
from connectors.hub.serving.bounded_http import note_principal
from connectors.hub.serving.strict_request import (
    NOT_KNOWN,
    HostNames,
    NotRead,
    StrictRequest,
    name_and_port,
    replayed,
    shown,
)
from connectors.operations.messages.deliveries import IsGone, never_gone
from schemas.streams.agents.agent_registry import AgentCalled
from schemas.streams.refused.refusal import RefusalReason
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.mcp.signing import (
    AGENT_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    signature_bytes,
)
from trunkline_agent.wire.ids import is_name
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.verdicts import ACCEPTED, MALFORMED, POLICY, REJECTED, TOO_LARGE, UNAUTHORIZED

DOOR: Final = "mcp"
SIGNED_HEADERS: Final = (AGENT_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
# The keys of an ASGI scope for the agent that signed the request, for the decoded body (None without a body),
# and for the tool that it calls, else None.
PRINCIPAL: Final = "trunkline_principal"
DOCUMENT: Final = "trunkline_document"
TOOL: Final = "trunkline_tool"
# Whether the present call is answered by a server-sent event, of which the official client reads 1 MiB.
IS_EVENT: Final[ContextVar[bool]] = ContextVar("is_event", default=False)
# Tells whether the client of the present call does not answer a probe of the connection that gets the answer.
IS_GONE: Final[ContextVar[IsGone]] = ContextVar("is_gone", default=never_gone)
# Space around a message of the greatest length, for JSON-RPC and names. `\uXXXX` takes at most three times the
# bytes of its character, except for control characters.
_AROUND_BYTES: Final = 64 * 1024
_ESCAPES: Final = 3
_ROUTE: Final = "MCP"


def body_limit_bytes(payload_bytes: int) -> int:
    """Return the largest allowed size in bytes of a request to the agent MCP server.

    `payload_bytes` is the setting `limits.payload_bytes`, the limit of a message's text in UTF-8. The result
    leaves room for JSON escapes and for the JSON-RPC fields around the text.
    """
    return _ESCAPES * payload_bytes + _AROUND_BYTES


class CallSignatures:
    """The check of the signatures of requests, and the answers to those that are refused.

    Args:
        hub: The hub, for its refusals.
        keys: The public keys of the agents.
    """

    def __init__(self, hub: Hub, keys: AgentKeys) -> None:
        self._hub = hub
        self._keys = keys

    def check(self, body: bytes, agent_name: str, timestamp: str, signature: str) -> bytes:
        """Return the signature of a request, from its three headers. Raises ApiError (403)."""
        if not is_name(agent_name):
            raise _forbidden(f"{AGENT_HEADER} is not a valid name")
        why_not = self._keys.verify_signature(agent_name, timestamp, body, signature)
        if why_not is not None:
            raise _forbidden(why_not)
        return signature_bytes(signature) or b""

    def refusal(self, error: ApiError, agent_name: str | None) -> Response:
        """Record a refusal, and return its answer. `agent_name` is the agent that signed, None if unknown."""
        reasons: tuple[RefusalReason, ...] = (UNAUTHORIZED, MALFORMED, TOO_LARGE)
        for reason in reasons:
            if error.reason == reason and not isinstance(error, NotRead):
                self._hub.refusals.record(reason, str(error.detail), agent_name, _ROUTE)
        headers = dict(error.headers or {})
        return error_response(error.status_code, error.reason, str(error.detail), headers)


def called_record(agent_name: str, signature: bytes, tool: str) -> OutgoingRecord:
    """Return the record of the signature of a call that changes something."""
    digest = hashlib.sha256(signature).hexdigest()
    called = AgentCalled(agent_name=agent_name, signature=digest, tool=tool if is_name(tool) else "unknown")
    return called.record(door=DOOR, principal=agent_name)


def check_noted(found: SettledRecord | Exception) -> None:
    """Check a settled `called_record`, or the error of the appender.

    Raises ApiError: 403 for a signature that was recorded before, 503 while Kafka is away.
    """
    if isinstance(found, BackboneUnreachable):
        raise unavailable(str(found))
    if isinstance(found, TrunklineError):
        raise ApiError(500, INTERNAL, str(found))
    if isinstance(found, Exception):
        raise found
    if found.verdict == REJECTED:  # the agent has stopped, and its keys are about to be removed
        raise _forbidden(found.why or "this agent does not take part")
    if found.verdict != ACCEPTED:
        raise _forbidden("this signature was used before: sign each call anew")


class SignedRequests:
    """ASGI middleware that passes on only requests with a valid signature of an agent, and answers all others.

    The signing agent's name, the decoded body and the called tool are passed on in the ASGI scope (`PRINCIPAL`,
    `DOCUMENT`, `TOOL`).

    Args:
        app: The application that gets the admitted requests.
        hub: The hub, for its log appender and limits.
        keys: The public keys of the agents.
        only_reads: Returns whether the tool with this name changes nothing. A signature is valid for one call
            of any other tool.
        names: The host names under which the door answers.
        paths: The paths that metrics and access log may name.
    """

    def __init__(
        self,
        app: ASGIApp,
        hub: Hub,
        keys: AgentKeys,
        only_reads: Callable[[str], bool],
        names: HostNames,
        paths: Collection[str],
    ) -> None:
        self._app = app
        self._paths = paths
        self._hub = hub
        self._signatures = CallSignatures(hub, keys)
        self._only_reads = only_reads
        self._names = names
        self._limit_bytes = body_limit_bytes(hub.settings.limits.payload_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a correctly signed request on to the application, or answer it with an error.

        A refusal is recorded in the log. A call that changes something is recorded before it is passed on.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._paths:
            scope["trunkline_route"] = scope["path"]
        request = StrictRequest(scope, receive, self._limit_bytes)
        agent_name = None
        try:
            body = await request.body()
            agent_name, signature = self._signer(request, body)
            self._check_host(scope)
            note_principal(scope, f"{DOOR}/{agent_name}")
            await self._hub.turns.wait(f"{DOOR}/{agent_name}")
            scope[DOCUMENT] = document = _decoded(body)
            scope[TOOL] = tool = _called_tool(document)
            if tool is not None and not self._only_reads(tool):
                await self._note_call(agent_name, signature, tool)
        except ApiError as error:
            await self._signatures.refusal(error, agent_name)(scope, receive, send)
            return
        scope[PRINCIPAL] = agent_name
        # The transports read the owner of a session from this.
        scope["user"] = _user(agent_name)
        await self._app(scope, replayed(body, receive), send)

    def _check_host(self, scope: Scope) -> None:
        """Write the header `Host` as the library compares it. Raises ApiError (421) for an unknown name.

        A request without the header, or with several, is left to the library.
        """
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1:
            return
        host = hosts[0].decode("latin-1")
        name, port = name_and_port(host)
        if name not in self._names:
            why = f"the agent MCP door does not answer under the host {shown(host)}: {NOT_KNOWN}"
            raise ApiError(421, POLICY, why)
        usual = (f"{name}:{port}" if port else name).encode("latin-1")
        if usual != hosts[0]:
            others = (one for one in scope["headers"] if one[0] != b"host")
            scope["headers"] = [(b"host", usual), *others]

    def _signer(self, request: Request, body: bytes) -> tuple[str, bytes]:
        """Return the agent that signed the request, and the signature. Raises ApiError (403)."""
        values = {}
        for name in SIGNED_HEADERS:
            found = request.headers.getlist(name)
            if len(found) != 1:
                raise _forbidden(f"the request must have the header {name} exactly once")
            values[name] = found[0]
        return values[AGENT_HEADER], self._signatures.check(body, *values.values())

    async def _note_call(self, agent_name: str, signature: bytes, tool: str) -> None:
        """Record the signature of a call that changes something.

        Raises ApiError: 403 for a signature that was recorded before, 503 while Kafka is away.
        """
        found: SettledRecord | Exception
        try:
            async with self._hub.under_way.one(agent_name):
                found = await self._hub.appender.settle(called_record(agent_name, signature, tool))
        except TrunklineError as error:
            found = error
        check_noted(found)


def _decoded(body: bytes) -> dict[str, Any] | None:
    """Return the JSON-RPC message of a body, or None without a body. Raises ApiError (400).

    A body that could be read as several requests, or in two ways, is no JSON by CM-02.
    """
    if not body:
        return None
    try:
        document, _ = decode(body)
    except MalformedJsonError as error:
        raise malformed(f"body: {error}") from None
    if type(document) is not dict:
        raise malformed("body: not one JSON-RPC message")
    return document


def _called_tool(document: dict[str, Any] | None) -> str | None:
    """Return the tool that a request calls, or None if it calls none."""
    if document is None or document.get("method") != "tools/call":
        return None
    params: Any = document.get("params")
    name = params.get("name") if type(params) is dict else None
    return name if type(name) is str else ""


@lru_cache(maxsize=1024)
def _user(agent_name: str) -> AuthenticatedUser:
    return AuthenticatedUser(AccessToken(token="", client_id=agent_name, scopes=[]))


def _forbidden(why: str) -> ApiError:
    return ApiError(403, UNAUTHORIZED, why)
