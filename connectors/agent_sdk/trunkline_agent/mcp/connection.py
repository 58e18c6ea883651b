"""The connection of an agent to Trunkline's agent MCP server: the official MCP client with signed requests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Literal

import httpx2
from mcp import Client, MCPError
from mcp.client import Transport
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, JSONRPCError, jsonrpc_message_adapter

from trunkline_agent.credentials import Credentials
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError
from trunkline_agent.mcp.http_client import KEY_UNUSABLE, REFUSED, UNREACHABLE, AgentHttpClient, endpoint
from trunkline_agent.mcp.private_keys import AgentKey, KeyFileError, KeySource, KeyText
from trunkline_agent.mcp.signed_auth import SignedAuth
from trunkline_agent.mcp.tool_calls import WAITS_S, wait_of
from trunkline_agent.terminal_text import escaped

CALL_S: Final = 30.0
_ERRORS: Final[dict[int, type[TrunklineError]]] = {
    UNREACHABLE: BackboneUnreachable,
    REFUSED: Refused,
    KEY_UNUSABLE: KeyFileError,
}


class AgentClient(Client):
    """The official MCP client, which gives a call of a tool that waits so much more time for its answer."""

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        read_timeout_seconds: float | None = None,
        *others: Any,
        **options: Any,
    ) -> CallToolResult:
        """Call a tool, as `mcp.Client` does.

        Without `read_timeout_seconds` the answer may take the client's own time, and the time that the call
        asks the tool to wait (`timeoutSeconds`).
        """
        if read_timeout_seconds is None and self.read_timeout_seconds is not None and name in WAITS_S:
            read_timeout_seconds = self.read_timeout_seconds + wait_of(name, arguments or {})
        return await super().call_tool(name, arguments, read_timeout_seconds, *others, **options)


@asynccontextmanager
async def agent_client(
    url: str,
    agent_id: str,
    key: str | os.PathLike[str] | KeySource,
    *,
    transport: Literal["http", "sse"] = "http",
    call_s: float = CALL_S,
    ca_certs: str | os.PathLike[str] | None = None,
) -> AsyncIterator[Client]:
    """Connect to the agent MCP server, and yield the official MCP client, whose requests are signed.

    Use it with `async with`. Leaving the block closes the connection.

    Args:
        url: The server's address, such as `http://127.0.0.1:3100`. Without a path, that of the endpoint is
            added.
        agent_id: The agent's registered name.
        key: The PEM file with the agent's private key, which only its owner may read; or a key that is loaded
            already, such as `KeyText`.
        transport: Streamable HTTP, or the older server-sent events.
        call_s: The longest time that a call waits for its answer, in seconds. A call of a tool that waits, such
            as `wait_for_messages`, also has the time that it asks the tool to wait.
        ca_certs: The file with the authority that signed the server's certificate. None means the file that
            TRUNKLINE_CA_CERTS names, else the authorities of the machine.

    Raises:
        TrunklineError: At entry: BackboneUnreachable, Refused, UsageError for a wrong argument (KeyFileError
            for the key), or TrunklineError itself for an address where no agent MCP server answers.
        MCPError: From a call without an answer, with the code UNREACHABLE, REFUSED or KEY_UNUSABLE. The
            connection stays usable, so the caller may call again.
    """
    trusted = None if ca_certs is None else os.fspath(ca_certs)
    source = AgentKey(key) if isinstance(key, str | os.PathLike) else key
    auth = SignedAuth(agent_id, source)
    # Read the key before the first request, so that a bad key is reported as such.
    source.current()
    raised: BaseException | None = None
    try:
        async with AgentClient(
            _transport(url, auth, transport, trusted), read_timeout_seconds=call_s, cache=None
        ) as client:
            try:
                yield client
            except BaseException as error:
                raised = error
                raise
    except BaseExceptionGroup as group:
        # The transports' task groups wrap errors in groups; the caller wants the error itself.
        if raised is not None and any(leaf is raised for leaf in _leaves(group)):
            raise raised from None
        raise known_error(_leaves(group)[0]) from group
    except (MCPError, httpx2.HTTPStatusError) as error:
        if error is raised:
            raise
        raise known_error(error) from error


def connect(
    credentials: Credentials,
    *,
    transport: Literal["http", "sse"] = "http",
    call_s: float = CALL_S,
) -> AbstractAsyncContextManager[Client]:
    """Connect to the agent MCP server with an agent's credentials. See `agent_client`, also for the arguments.

        async with connect(Credentials.load("builder.json")) as client:
            await client.call_tool("get_my_messages", {})

    Raises UsageError for credentials without the section `mcp`, and KeyFileError if its key is not usable.
    """
    access = credentials.mcp_access()
    return agent_client(
        access.url,
        credentials.name,
        KeyText(access.private_key),
        transport=transport,
        call_s=call_s,
        ca_certs=credentials.ca_certs,
    )


def _transport(url: str, auth: SignedAuth, transport: str, ca_certs: str | None) -> Transport:
    if transport == "sse":
        address = endpoint(url, "/sse")

        def client_for(*_: Any, **_options: Any) -> httpx2.AsyncClient:
            return AgentHttpClient(address, auth, ca_certs=ca_certs)

        return sse_client(address, httpx_client_factory=client_for)
    return _streamable(endpoint(url, "/mcp"), auth, ca_certs)


@asynccontextmanager
async def _streamable(address: str, auth: SignedAuth, ca_certs: str | None) -> AsyncIterator[Any]:
    async with (
        AgentHttpClient(address, auth, ca_certs=ca_certs) as http,
        streamable_http_client(address, http_client=http) as both,
    ):
        yield both


def known_error(error: BaseException) -> BaseException:
    """Return our own error for an error of the official client, or the error itself if there is none.

    The result is Refused, BackboneUnreachable, KeyFileError or TrunklineError.
    """
    if isinstance(error, httpx2.HTTPStatusError):
        # The older transport reads only the status. The body has the text of our HTTP client.
        try:
            told = jsonrpc_message_adapter.validate_json(error.response.content)
        except ValueError:
            told = None
        if not isinstance(told, JSONRPCError):
            return TrunklineError(f"no agent MCP server: it answers {error.response.status_code}")
        error = MCPError.from_jsonrpc_error(told)
    if isinstance(error, MCPError):
        return _ERRORS.get(error.code, TrunklineError)(escaped(error.message))
    return error


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
