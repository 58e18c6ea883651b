"""A small agent MCP server of the `mcp` package on a loopback port: checks signatures, has mailboxes in memory.

It stands in front of no Kafka: what the client does is looked at here, the real door has its own tests.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from mcp import types
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from tests.broker_processes import wait_until
from trunkline_agent.mcp.signing import WINDOW_S, timestamp_seconds, verify


@dataclass(frozen=True)
class Seen:
    """One request as the door received it."""

    method: str
    agent: str
    timestamp: str
    signature: str
    body: bytes
    headers: dict[str, str]

    @property
    def document(self) -> dict[str, Any]:
        """Its body as JSON."""
        return json.loads(self.body)


@dataclass
class SignedDoor:
    """The door. `keys` are the public keys by agent; `seen` is all that came, refused or not."""

    port: int
    keys: dict[str, str]
    seen: list[Seen] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    signatures: set[str] = field(default_factory=set)
    messages: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[tuple[str, str]] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    unmarkable: set[str] = field(default_factory=set)
    without_kafka: int = 0
    stall: Callable[[], None] | None = None

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def calls(self) -> list[Seen]:
        """Return the calls of tools."""
        return [one for one in self.seen if b"tools/call" in one.body]

    def write(self, sender: str, to: str, content: str) -> str:
        """Put a message into a mailbox; its id."""
        identity = f"m{len(self.messages)}"
        self.messages.append(
            {
                "id": identity,
                "from": sender,
                "to": to,
                "content": content,
                "timestamp": int(time.time() * 1000),
                "read": False,
                "priority": "normal",
            }
        )
        return identity

    def mail_of(self, agent: str) -> list[dict[str, Any]]:
        """All messages to an agent."""
        return [message for message in self.messages if message["to"] == agent]

    def unread(self, agent: str) -> list[dict[str, Any]]:
        """The messages to an agent that it has not marked as read."""
        return [message for message in self.mail_of(agent) if not message["read"]]

    @contextlib.contextmanager
    def running(self) -> Iterator[SignedDoor]:
        """Serve until the block ends. A second run on the same port knows none of the first one's sessions."""
        config = uvicorn.Config(
            self._checked(application(self)), host="127.0.0.1", port=self.port, log_level="error"
        )
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_until(lambda: server.started, what="the door")
            yield self
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()

    def _checked(self, application: Callable[..., Any]) -> Callable[..., Any]:
        async def check(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await application(scope, receive, send)
                return
            body = b""
            while True:
                part = await receive()
                body += part.get("body", b"")
                if not part.get("more_body"):
                    break
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            why = self._fault(scope["method"], headers, body)
            if why is not None:
                self.refused.append(why)
                told = {"reason": "unauthorized", "message": "not signed"}
                await JSONResponse(told, 403)(scope, receive, send)
                return
            given = False

            async def again() -> Message:
                nonlocal given
                if given:
                    return await receive()
                given = True
                return {"type": "http.request", "body": body, "more_body": False}

            await application(scope, again, send)

        return check

    def _fault(self, method: str, headers: dict[str, str], body: bytes) -> str | None:
        """Why a request is refused, if it is."""
        agent, timestamp, signature = (
            headers.get(name, "") for name in ("x-agent-id", "x-timestamp", "x-signature")
        )
        self.seen.append(Seen(method, agent, timestamp, signature, body, headers))
        seconds = timestamp_seconds(timestamp)
        if agent not in self.keys or seconds is None or abs(seconds - time.time()) > WINDOW_S:
            return "unknown agent or time"
        if not verify(self.keys[agent], timestamp, body, signature):
            return "wrong signature"
        if b"tools/call" in body:
            if signature in self.signatures:
                return "replay"
            self.signatures.add(signature)
        return None


def application(door: SignedDoor) -> Starlette:
    """Both transports of one MCP server with the tools of AM-04."""
    server = tools(door)
    streamable, sse = server.streamable_http_app(), server.sse_app()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with server.session_manager.run():
            yield

    return Starlette(routes=[*streamable.routes, *sse.routes], lifespan=lifespan)


def tools(door: SignedDoor) -> MCPServer:
    """The tools, with the mailboxes of `door` behind them."""
    server = MCPServer("signed-door", log_level="ERROR")

    def caller(context: Context) -> str:
        assert context.headers is not None
        return context.headers["x-agent-id"]

    @server.tool()
    def discover_agents(context: Context) -> dict[str, Any]:
        if door.stall is not None:
            door.stall()
        return {"agents": sorted(door.keys), "you": caller(context)}

    @server.tool()
    def send_to_agent(
        context: Context,
        targetAgentId: str,  # noqa: N803
        message: str,
        idempotencyKey: str = "",  # noqa: N803
    ) -> dict[str, Any]:
        if targetAgentId in door.gone:
            raise ToolError("unknown_recipient")
        if door.without_kafka > 0:
            door.without_kafka -= 1
            said = {"reason": "unreachable", "message": "Kafka is away"}
            text = types.TextContent(type="text", text="unreachable: Kafka is away")
            return types.CallToolResult(content=[text], structured_content=said, is_error=True)
        return {"messageId": door.write(caller(context), targetAgentId, message), "key": idempotencyKey}

    @server.tool()
    def get_my_messages(context: Context, unreadOnly: bool = False) -> dict[str, Any]:  # noqa: N803
        mine = door.mail_of(caller(context))
        return {"messages": [message for message in mine if not (unreadOnly and message["read"])]}

    @server.tool()
    def mark_read(
        context: Context,
        messageIds: list[str],  # noqa: N803
        idempotencyKey: str = "",  # noqa: N803
    ) -> dict[str, Any]:
        for message in door.mail_of(caller(context)):
            marks = message["id"] in messageIds and message["id"] not in door.unmarkable
            message["read"] = message["read"] or marks
        return {"success": True, "key": idempotencyKey}

    @server.tool()
    def update_my_status(context: Context, status: str) -> dict[str, Any]:
        door.statuses.append((caller(context), status))
        return {"success": True}

    return server
