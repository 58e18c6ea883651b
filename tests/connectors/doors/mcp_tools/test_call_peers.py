"""Clients of MCP calls whose link has gone: a reply is not handed out for good to them (DL-52)."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import anyio
import orjson
import pytest
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings

from connectors.doors.mcp_tools.agents.signed_requests import IS_GONE, PRINCIPAL
from connectors.doors.mcp_tools.agents.sse_sessions import SseSessions
from connectors.doors.mcp_tools.agents.tool_arguments import AskAgent, SendToAgent
from connectors.hub.serving.bounded_http import PEER_ANSWERS
from connectors.hub.serving.metrics import Metrics
from connectors.hub.serving.shares import ByteBudget
from schemas.streams.mailboxes.message import CLAIMED, UNREAD, MessageRow
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.connectors.doors.mcp_tools.test_blob_tools import public_key
from tests.connectors.doors.mcp_tools.test_waiting_calls import answered, keys_of

pytestmark = pytest.mark.requirement("DL-52")

WAITS_S = 20


async def gone() -> bool:
    """A peer that is gone."""
    return True


async def silent() -> bool:
    """The answer to a probe of a peer that is gone."""
    return False


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_reply_stays_in_the_mailbox_of_an_asker_whose_link_has_gone(is_gone: bool) -> None:
    async def talk() -> None:
        hub = FoldedHub()
        for agent in ("ann", "bo"):
            hub.join(agent, public_key())
        if is_gone:
            IS_GONE.set(gone)
        question = AskAgent(targetAgentId="bo", message="?", timeoutSeconds=WAITS_S)
        ask = asyncio.create_task(hub.tools.ask_agent("ann", question))
        while not hub.mailboxes.messages(("default", "bo")):
            await asyncio.sleep(0)
        (question_id,) = hub.mailboxes.messages(("default", "bo"))
        await asyncio.sleep(0.01)  # it waits
        answer = SendToAgent(targetAgentId="ann", message="42", inReplyTo=question_id)
        reply_id = (await hub.tools.send_to_agent("bo", answer))["messageId"]
        hub.mailbox_waits.wake_all()
        found = await asyncio.wait_for(ask, WAITS_S)
        row = hub.get(MessageRow, f"default/ann/{reply_id}")
        assert row is not None
        assert (found["reply"] is None, row.status) == (is_gone, UNREAD if is_gone else CLAIMED)

    asyncio.run(talk())


def test_a_waiting_call_over_streamable_http_probes_its_own_connection() -> None:
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(await IS_GONE.get()())

    async def both() -> None:
        await answered(app, **{PEER_ANSWERS: silent})
        await answered(app)

    anyio.run(both)
    assert seen == [True, False]


def test_a_call_over_sse_probes_the_connection_of_its_stream() -> None:
    seen: list[bool] = []

    async def call(context: Any, params: Any) -> types.CallToolResult:
        seen.append(await IS_GONE.get()())
        return types.CallToolResult(content=[])

    security = TransportSecuritySettings(allowed_hosts=["x"])
    server: Server[Any] = Server("test", on_call_tool=call)
    sessions = SseSessions(
        server, keys_of("ann"), "/messages/", security, 10_000, Metrics(), ByteBudget(10_000)
    )
    call_tool = {"method": "tools/call", "params": {"name": "x", "arguments": {}}}
    version = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    posted = [
        {"method": "initialize", "params": version, "id": 1},
        {"method": "notifications/initialized"},
        {**call_tool, "id": 2},
    ]

    async def talk(is_silent: bool) -> None:
        sent, closed = asyncio.Queue[bytes](), asyncio.Event()
        own = {"type": "http", "headers": [(b"host", b"x")], "path": "/sse", "method": "GET", PRINCIPAL: "ann"}
        own["query_string"] = b""

        async def closing() -> dict[str, Any]:
            await closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await sent.put(message.get("body", b""))

        async def next_event() -> bytes:
            while not (event := await asyncio.wait_for(sent.get(), 10)).startswith(b"event"):
                pass
            return event

        scope = {**own, PEER_ANSWERS: silent} if is_silent else own
        stream = asyncio.create_task(sessions(scope, closing, send))
        session = re.search(rb"session_id=\w+", await next_event())
        assert session is not None
        for one in posted:
            body = {"type": "http.request", "body": orjson.dumps({"jsonrpc": "2.0", **one})}
            post = {**own, "method": "POST", "path": "/messages/", "query_string": session.group()}
            post["headers"] = [*own["headers"], (b"content-type", b"application/json")]

            async def receive(body: Any = body) -> Any:
                return body

            await sessions.post(post, receive, partial(asyncio.sleep, 0))
            if "id" in one:
                await next_event()
        closed.set()
        await asyncio.wait_for(stream, 10)

    for is_silent in (True, False):
        asyncio.run(talk(is_silent))
    assert seen == [True, False]
