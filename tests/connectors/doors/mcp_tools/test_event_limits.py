"""Contents that are longer than an event that the official client reads (AM-15)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from connectors.doors.mcp_tools.agents.mcp_tool import tool_result
from connectors.doors.mcp_tools.agents.signed_requests import DOCUMENT, IS_EVENT
from connectors.doors.mcp_tools.agents.tool_arguments import GetMyMessages, LeaseMessages, ReadBlob, SendToAgent
from connectors.hub.serving.answers import ApiError
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import called, sent
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.connectors.doors.mcp_tools.test_waiting_calls import answered
from tests.schemas.hub_records import public_key

pytestmark = pytest.mark.requirement("AM-15")

MIB = 1024 * 1024
LONG = {
    "plain": "x" * 700_000,
    "quotes": '"' * 250_000,
    "control": "\x01" * 100_000,
    "snow": "\u2603" * 300_000,
}


def event_of(answer: dict[str, Any]) -> bytes:
    """The bytes of an answer in an event."""
    return tool_result(answer).model_dump_json(by_alias=True, exclude_unset=True).encode()


@pytest.mark.parametrize("name", LONG)
def test_a_content_that_no_event_takes_is_left_out_and_read_in_parts(name: str) -> None:
    content = LONG[name]

    async def talk() -> None:
        hub = FoldedHub()
        for agent in ("ann", "bo"):
            hub.join(agent, public_key())
        for text in ("before", content):
            await hub.tools.send_to_agent("bo", SendToAgent(targetAgentId="ann", message=text))
        whole = await hub.tools.get_my_messages("ann", GetMyMessages())
        assert [one["content"] for one in whole["messages"]] == ["before", content]
        assert len(event_of(whole)) > MIB
        IS_EVENT.set(True)
        listed = await hub.tools.get_my_messages("ann", GetMyMessages())
        if not listed["more"]:
            assert [one["content"] for one in listed["messages"]] == ["before", None]
        leased = await hub.tools.lease_messages("ann", LeaseMessages(limit=1))
        leased = await hub.tools.lease_messages("ann", LeaseMessages(limit=1))
        (message,) = leased["messages"]
        assert (message["content"], message["contentBytes"]) == (None, len(content.encode()))
        for answer in (listed, leased):
            assert len(event_of(answer)) < MIB
        read, is_last = b"", False
        while not is_last:
            part = await hub.blob_tools.read_blob(
                "ann", ReadBlob(messageId=message["id"], offset=len(read), limit=MIB)
            )
            assert len(event_of(part)) < MIB
            read, is_last = read + base64.b64decode(part["content"]), part["isLast"]
        assert read.decode() == content
        assert (part["bytes"], part["digest"]) == (len(read), hashlib.sha256(read).hexdigest())
        with pytest.raises(ApiError):
            await hub.blob_tools.read_blob("bo", ReadBlob(messageId=message["id"]))

    asyncio.run(talk())


def test_a_call_with_a_progress_token_may_be_answered_by_an_event() -> None:
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(IS_EVENT.get())

    async def both() -> None:
        for meta in ({"progressToken": 1}, {}):
            document = {"params": {"name": "waits", "_meta": meta}}
            await answered(app, **{DOCUMENT: document, "headers": [(b"accept", b"text/event-stream")]})

    anyio.run(both)
    assert seen == [True, False]


@pytest.mark.timeout(120)
def test_the_official_client_gets_the_longest_messages_over_sse(
    shared_gateway: McpGateway, new_agent: Callable[[str], Agent]
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")
    content = "x" * (shared_gateway.settings.limits.payload_bytes - 100)

    async def talk() -> None:
        async with ann.client(shared_gateway, "sse") as a, bo.client(shared_gateway) as b:
            message_id = await sent(b, ann.name, content)
            (message,) = (await called(a, "wait_for_messages", timeoutSeconds=20))["messages"]
            assert (message["id"], message["content"]) == (message_id, None)
            read = b""
            while len(read) < message["contentBytes"]:
                part = await called(a, "read_blob", messageId=message_id, offset=len(read))
                read += base64.b64decode(part["content"])
            assert read.decode() == content

    anyio.run(talk)
