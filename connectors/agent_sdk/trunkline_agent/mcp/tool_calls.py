"""Calls of the agent MCP server's tools by signed JSON-RPC alone, without the official client.

    async with AsyncToolCalls(Credentials.load("builder.json")) as tools:
        await tools.call("send_to_agent", {"targetAgentId": "planner", "message": "ready"})

The official client validates each message and passes it through several tasks, so a call costs three times as
much. It knows all of MCP; this knows `tools/call`, which the server answers without a session.
"""

from __future__ import annotations

import itertools
import secrets
import time
from typing import Any, Final, Self

from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import RateLimited, Refused, TrunklineError, UsageError
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.hub_requests import JSON_CONTENT, encoded
from trunkline_agent.hub.plans import Plan, Request, Retries, exchange
from trunkline_agent.mcp.private_keys import KeyText
from trunkline_agent.mcp.signed_auth import SIGNING_TIMES
from trunkline_agent.mcp.signing import AGENT_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign

# The seconds that a tool waits if the call does not say so.
WAITS_S: Final = {"wait_for_messages": 30, "ask_agent": 30, "lease_messages": 0}
NONCE: Final = "trunkline/nonce"
_PATH: Final = "/mcp"
_HEADERS: Final = {"Accept": f"{JSON_CONTENT}, text/event-stream", "Content-Type": JSON_CONTENT}
# A request that is sent again has a signature that was used, which the server refuses.
_ONCE: Final = Retries(patience_s=0.0)
_LIMITED: Final = "retryAfterSeconds"
_USAGE: Final = "malformed"


def new_nonce() -> str:
    """Return a nonce, which makes the bytes of a call unique, also among processes of one agent."""
    return secrets.token_urlsafe(16)


def wait_of(tool: str, arguments: dict[str, Any]) -> float:
    """Return for how many seconds a call lets its tool wait."""
    wait_s = arguments.get("timeoutSeconds", WAITS_S[tool]) if tool in WAITS_S else 0
    # The server refuses any other value at once.
    return float(wait_s) if isinstance(wait_s, int | float) and wait_s > 0 else 0.0


class AsyncToolCalls:
    """An agent's calls of tools, for any number of tasks of one event loop. Use it with `async with`.

    The constructor makes no request. No call is repeated: after BackboneUnreachable it is unknown whether the
    call was carried out. Call again with the same argument `idempotencyKey`, for the tools that have it.

    Args:
        credentials: The credentials, with the section `mcp`.

    Raises:
        UsageError: They have no such section, or the address or the key is not valid.
    """

    def __init__(self, credentials: Credentials) -> None:
        access = credentials.mcp_access()
        self._name, self._key = credentials.name, KeyText(access.private_key)
        self._key.current()
        self._hub = AsyncHubClient(HubAccess(access.url.removesuffix(_PATH)), credentials.ca_certs)
        self._numbers = itertools.count(1)

    async def call(self, tool: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a tool and return its result, which is its structured content.

        Raises:
            UsageError: The server says that the arguments are malformed, or they are not JSON.
            RateLimited: A limit of the agent, or of the recipient's mailbox.
            Refused: The signature is not accepted, or the tool refuses the call: `.reason` says why.
            BackboneUnreachable: There was no answer, or the backbone is away.
        """
        return await self._hub.run(self._call(tool, arguments or {}))

    async def close(self) -> None:
        """Close the connections."""
        await self._hub.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _call(self, tool: str, arguments: dict[str, Any]) -> Plan[dict[str, Any]]:
        params = {"name": tool, "arguments": arguments, "_meta": {NONCE: new_nonce()}}
        body = encoded({"jsonrpc": "2.0", "id": next(self._numbers), "method": "tools/call", "params": params})
        at = str(SIGNING_TIMES.next_for(self._name, body, int(time.time())))
        headers = {
            **_HEADERS,
            AGENT_HEADER: self._name,
            TIMESTAMP_HEADER: at,
            SIGNATURE_HEADER: sign(self._key.current(), at, body),
        }
        wait_s = wait_of(tool, arguments)
        request = Request("POST", _PATH, None, headers, body, wait_s, is_repeatable=False)
        return _result_of((yield from exchange(request, _ONCE)).json())


def _result_of(told: Any) -> dict[str, Any]:
    try:
        if "error" in told:
            # JSON-RPC's own errors: no such tool, or a request that is none.
            raise UsageError(str(told["error"]["message"]))
        result, said = told["result"], told["result"]["structuredContent"]
        if not result.get("isError"):
            return dict(said)
        reason, message = str(said["reason"]), str(said["message"])
    except (KeyError, TypeError, ValueError):
        raise TrunklineError(
            "the answer is not that of an agent MCP server",
            reason="not_a_gateway",
            advice="check the address in the section mcp of the credentials",
        ) from None
    if (retry_after_s := said.get(_LIMITED)) is not None:
        raise RateLimited(message, retry_after_s=float(retry_after_s), reason=reason)
    raise (UsageError if reason == _USAGE else Refused)(message, reason=reason)
