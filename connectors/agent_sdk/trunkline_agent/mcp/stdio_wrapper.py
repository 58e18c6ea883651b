"""An MCP server over stdio that signs messages and passes them on to the gateway (AM-10).

Any MCP client that can run a command can take part by it. **Delivers** each message once, in the order of the
protocol, to the agent MCP server and its answers back. **Acknowledges when** the server has answered. **Loses**
no request silently: a request without an answer from the gateway is answered with a JSON-RPC error. So are the
requests that are open when the input ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio.abc import TaskStatus
from mcp import stdio_server
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
)
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp.types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    PROTOCOL_VERSION_META_KEY,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from trunkline_agent.credentials import AGENT_ID_VARIABLE, AGENT_KEY_VARIABLE, MCP_URL_VARIABLE
from trunkline_agent.errors import TrunklineError, UsageError
from trunkline_agent.mcp.http_client import UNREACHABLE, ReopeningClient, endpoint
from trunkline_agent.mcp.private_keys import AgentKey, KeySource
from trunkline_agent.mcp.signed_auth import SignedAuth
from trunkline_agent.terminal_text import escaped


class MessageHeaders:
    """The HTTP headers that MCP requires with the messages of one connection that comes over stdio.

    The headers repeat fields of the JSON-RPC message, such as the protocol version. The newer protocol states
    its version in each message. The older one states it only in its handshake, so this object remembers it.
    """

    def __init__(self) -> None:
        self._handshakes: set[str | int] = set()
        self._version: str | None = None

    def of_request(self, message: JSONRPCMessage) -> dict[str, str]:
        """Return the HTTP headers for sending `message` to the server; empty if MCP requires none."""
        if not isinstance(message, JSONRPCRequest | JSONRPCNotification):
            return self._version_header(self._version)
        if isinstance(message, JSONRPCRequest) and message.method == "initialize":
            self._handshakes.add(message.id)
            return {}
        params = message.params or {}
        meta = params.get("_meta")
        version = meta.get(PROTOCOL_VERSION_META_KEY) if isinstance(meta, dict) else None
        if not isinstance(version, str):
            return self._version_header(self._version)
        headers = self._version_header(version)
        if _is_plain(message.method):
            headers[MCP_METHOD_HEADER] = message.method
        if isinstance(name := params.get(NAME_BEARING_METHODS.get(message.method, "")), str):
            headers[MCP_NAME_HEADER] = encode_header_value(name)
        return headers

    def see_answer(self, message: JSONRPCResponse | JSONRPCError) -> None:
        """Remember the protocol version, if `message` is the server's answer to a handshake.

        A handshake is a request `initialize` that went through `of_request`. Any other answer is ignored.
        """
        if message.id not in self._handshakes:
            return
        self._handshakes.discard(message.id)
        result: Any = message.result if isinstance(message, JSONRPCResponse) else None
        if isinstance(result, dict) and isinstance(version := result.get("protocolVersion"), str):
            self._version = version

    def _version_header(self, version: str | None) -> dict[str, str]:
        return {MCP_PROTOCOL_VERSION_HEADER: version} if version is not None and _is_plain(version) else {}


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and text == text.strip()


if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

# The wait after the input's end. A client's host kills this process after two seconds.
_DRAIN_S: Final = 1.5


class StdioWrapper:
    """The passing of messages between an MCP client on stdio and the server. It knows which requests are open.

    Args:
        client: The streams from and to the client, as `mcp.server.stdio.stdio_server` yields them.
        server: The streams from and to the server, as `streamable_http_client` yields them.
    """

    def __init__(self, client: TransportStreams, server: TransportStreams) -> None:
        self._from_client, self._to_client = client
        self._from_server, self._to_server = server
        self._headers = MessageHeaders()
        self._open: dict[RequestId, None] = {}
        self._all_answered = anyio.Event()
        self._ended = False

    async def run(self) -> None:
        """Pass messages in both directions until the client's input has ended and all requests are answered.

        After the input's end it waits at most 1.5 seconds for answers. Requests that are still open then are
        answered with an error.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._answers)
            await self._requests()
            self._ended = True
            if self._open:
                with anyio.move_on_after(_DRAIN_S):
                    await self._all_answered.wait()
            tasks.cancel_scope.cancel()
        for identity in list(self._open):
            await self._fail(identity, UNREACHABLE, "the input ended before the gateway had answered")

    async def _requests(self) -> None:
        async for item in self._from_client:
            if isinstance(item, Exception):
                await self._fail(None, PARSE_ERROR, "this line is no message of JSON-RPC")
                continue
            message = item.message
            if isinstance(message, JSONRPCRequest):
                if message.id in self._open:
                    await self._fail(message.id, INVALID_REQUEST, "a request with this id is open already")
                    continue
                self._open[message.id] = None
            elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
                cancelled = cancelled_request_id_from_params(message.params)
                # The client does not wait for the answer any more, and there may be none.
                if cancelled is not None:
                    self._open.pop(cancelled, None)
            metadata = ClientMessageMetadata(headers=self._headers.of_request(message))
            await self._to_server.send(SessionMessage(message, metadata))

    async def _answers(self) -> None:
        async for item in self._from_server:
            if isinstance(item, Exception):
                _say(str(item))
                continue
            message = item.message
            if isinstance(message, JSONRPCResponse | JSONRPCError):
                self._headers.see_answer(message)
                if message.id is not None and message.id not in self._open:
                    continue  # the client has cancelled the request, and MCP wants no answer then
            await self._to_client.send(SessionMessage(message))
            if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
                self._open.pop(message.id, None)
                if self._ended and not self._open:
                    self._all_answered.set()

    async def _fail(self, identity: RequestId | None, code: int, text: str) -> None:
        error = JSONRPCError(jsonrpc="2.0", id=identity, error=ErrorData(code=code, message=text))
        await self._to_client.send(SessionMessage(error))


async def serve(address: str, auth: SignedAuth, ca_certs: str | None = None) -> None:
    """Serve MCP on stdin and stdout until stdin ends, and pass the messages on to the server, signed.

    SIGINT and SIGTERM end the whole process at once with exit code 128 plus the signal's number. An internal
    error ends it with exit code 1. In both cases the function does not return.

    Args:
        address: The address of the agent MCP server's endpoint, with its path.
        auth: The signature of the requests.
        ca_certs: The file with the authority that signed the server's certificate. None means the file that
            TRUNKLINE_CA_CERTS names, else the authorities of the machine.
    """
    async with anyio.create_task_group() as tasks:
        await tasks.start(_end_at_a_signal)
        async with stdio_server() as client:
            try:
                async with (
                    ReopeningClient(address, auth, ca_certs) as http,
                    streamable_http_client(address, http_client=http, max_sse_event_size=None) as server,
                ):
                    await StdioWrapper(client, server).run()
            except Exception as error:  # noqa: BLE001  end the process, because nothing would answer an input that stays open
                _say(repr(error))
                os._exit(1)
            # Close the stream, so that the writer writes all that was sent and stops.
            await client[1].aclose()
        tasks.cancel_scope.cancel()


async def _end_at_a_signal(*, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            # A thread reads the input, and only a line or the end of the input would wake it up.
            os._exit(128 + number)


def _say(text: str) -> None:
    print(f"trunkline agent: {escaped(text)[:1000]}", file=sys.stderr, flush=True)


def serve_stdio(url: str, agent_id: str, key: KeySource, ca_certs: str | None = None) -> int:
    """Serve MCP on stdin and stdout for an agent until stdin ends, and return the exit code 0 or 1.

    Signals end the process, see `serve`.

    Args:
        url: The address of the agent MCP server.
        agent_id: The agent's registered name.
        key: The agent's private key.
        ca_certs: The file with the authority that signed the server's certificate, see `serve`.

    Raises:
        UsageError: A wrong address or name, or KeyFileError: the key cannot be used.
    """
    key.current()
    try:
        anyio.run(serve, endpoint(url, "/mcp"), SignedAuth(agent_id, key), ca_certs)
    except BaseExceptionGroup as group:
        _say(repr(group))
        return 1
    return 0


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Serve MCP on stdin and stdout for the agent that the environment names, and return the exit code.

    The variable AGENT_ID names the agent, AGENT_KEY_PATH the file of its private key, and MCP_SERVER_URL the
    server's address. Errors are printed on stderr. The exit code is 0 when stdin has ended, 2 for a missing or
    wrong variable or key, and 1 for an internal error.
    """
    try:
        needed = (AGENT_ID_VARIABLE, AGENT_KEY_VARIABLE, MCP_URL_VARIABLE)
        if missing := [name for name in needed if not environment.get(name)]:
            raise UsageError(f"set {', '.join(missing)}")
        key = AgentKey(environment[AGENT_KEY_VARIABLE])
        return serve_stdio(environment[MCP_URL_VARIABLE], environment[AGENT_ID_VARIABLE], key)
    except TrunklineError as error:
        _say(str(error))
        return error.exit_code
