"""Waits of MCP tools at a real gateway (DL-09): they end with their client, and block no other call."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import REQUEST_TIMEOUT

from connectors.doors.mcp_tools.agents.agent_keys import AgentKeys
from connectors.doors.mcp_tools.agents.signed_requests import PRINCIPAL, TOOL
from connectors.doors.mcp_tools.agents.tool_arguments import ARGUMENTS, WAITS
from connectors.doors.mcp_tools.agents.waiting_calls import WaitingCalls
from schemas.streams.agents.agent_registry import AgentKeyRow
from tests.connectors.doors.mcp_tools.conftest import PARTICIPANTS, Agent, McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import (
    at_once,
    called,
    ids,
    sent,
    wait_for_waits,
    waiting,
    waits_at,
)
from tests.connectors.doors.mcp_tools.signed_calls import ACCEPT, MCP, SignedCaller, call_body, open_stream
from trunkline_agent.mcp import REFUSED, AgentKey, SignedAuth, agent_client
from trunkline_agent.mcp.tool_calls import WAITS_S

pytestmark = [pytest.mark.requirement("DL-09"), pytest.mark.timeout(120)]

NewAgent = Callable[[str], Agent]
NewCaller = Callable[[str], SignedCaller]
LONG_S = 240
WAITING: dict[str, dict[str, Any]] = {
    "wait_for_messages": {"timeoutSeconds": LONG_S},
    "lease_messages": {"timeoutSeconds": LONG_S},
    "ask_agent": {"targetAgentId": "operator", "message": "?", "timeoutSeconds": LONG_S},
}
both_transports = pytest.mark.parametrize("transport", ["http", "sse"])
# "At once" on a busy machine.
SOON_S = 3


def test_the_client_knows_how_long_a_tool_waits_by_itself() -> None:
    assert {name: ARGUMENTS[name].model_fields["timeout_seconds"].default for name in WAITS} == WAITS_S
    assert WAITING.keys() == WAITS


@both_transports
def test_a_call_that_is_cancelled_ends_its_wait_at_once_and_is_handed_no_message(
    shared_gateway: McpGateway, new_agent: NewAgent, transport: str
) -> None:
    ann = new_agent("ann")

    async def talk() -> None:
        async with ann.client(shared_gateway, transport) as a, ann.client(shared_gateway, transport) as other:
            for tool, arguments in WAITING.items():
                async with anyio.create_task_group() as calls:
                    calls.start_soon(a.call_tool, tool, arguments)
                    await waiting(shared_gateway)
                    calls.cancel_scope.cancel()
                assert await waiting(shared_gateway, 0) < SOON_S, tool
                with pytest.raises(MCPError) as late:
                    await a.call_tool(tool, arguments, read_timeout_seconds=0.5)
                assert late.value.code == REQUEST_TIMEOUT
                assert await waiting(shared_gateway, 0) < SOON_S, tool
            message_id = await sent(a, ann.name, "for the next one")
            lease = await called(other, "lease_messages")
            assert [(one["id"], one["attempt"]) for one in lease["messages"]] == [(message_id, 1)]

    anyio.run(talk)


@pytest.mark.parametrize("accept", [ACCEPT["Accept"], "application/json"])
@pytest.mark.parametrize("version", ["2025-06-18", None])
def test_a_client_that_has_gone_ends_its_wait_at_once_and_is_handed_no_message(
    shared_gateway: McpGateway, new_caller: NewCaller, accept: str, version: str | None
) -> None:
    ann = new_caller("ann")
    port = urlsplit(shared_gateway.mcp_url).port
    assert port is not None
    for tool, arguments in WAITING.items():
        body = call_body(tool, **arguments)
        fields = {**ACCEPT, "Accept": accept, **ann.headers(body), "Content-Length": str(len(body))}
        if version is not None:
            fields["MCP-Protocol-Version"] = version
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        with closing(socket.create_connection(("127.0.0.1", port))) as connection:
            connection.sendall(f"POST {MCP} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{head}\r\n".encode() + body)
            wait_for_waits(shared_gateway, 1)
        assert wait_for_waits(shared_gateway, 0) < SOON_S, tool
    message_id = ann.call("send_to_agent", targetAgentId=ann.name, message="for the next one")["messageId"]
    lease = ann.call("lease_messages")
    assert [(one["id"], one["attempt"]) for one in lease["messages"]] == [(message_id, 1)]


def test_a_stream_that_has_gone_ends_its_waits_at_once(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann = new_caller("ann")
    with open_stream(ann) as stream:
        for tool, arguments in WAITING.items():
            assert ann.post(call_body(tool, **arguments), path=stream.path).status_code == 202
        wait_for_waits(shared_gateway, 3)
    assert wait_for_waits(shared_gateway, 0) < SOON_S
    message_id = ann.call("send_to_agent", targetAgentId=ann.name, message="for the next one")["messageId"]
    assert ids(ann.call("lease_messages")) == [message_id]


def test_an_agent_that_is_stopped_gets_no_message_of_one_that_joins_by_its_name(
    shared_gateway: McpGateway, new_agent: NewAgent, tmp_path: Path
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")

    async def talk(operator: httpx.Client) -> None:
        async with ann.client(shared_gateway) as a, bo.client(shared_gateway) as b:
            ended: list[MCPError] = []

            async def lease() -> None:
                with pytest.raises(MCPError) as refused:
                    await a.call_tool("lease_messages", WAITING["lease_messages"])
                ended.append(refused.value)

            async with anyio.create_task_group() as calls:
                calls.start_soon(lease)
                await waiting(shared_gateway)
                assert operator.post(f"{PARTICIPANTS}/{ann.name}/stop").status_code == 200
                assert await waiting(shared_gateway, 0) < SOON_S
            assert (ended[0].code, ended[0].message) == (
                REFUSED,
                "the gateway answers 403: this agent has no key any more",
            )
            again = Agent(ann.name, tmp_path).joined(operator)
            message_id = await sent(b, ann.name, "for the new one")
            async with again.client(shared_gateway) as new:
                assert ids(await called(new, "lease_messages")) == [message_id]

    with shared_gateway.client() as operator:
        anyio.run(talk, operator)


@both_transports
def test_many_waits_of_one_session_hold_up_none_of_its_other_calls_and_need_no_thread(
    shared_gateway: McpGateway, new_agent: NewAgent, transport: str
) -> None:
    ann = new_agent("ann")

    async def talk() -> None:
        async with ann.client(shared_gateway, transport) as a:
            waits = [partial(called, a, "wait_for_messages", timeoutSeconds=60) for _ in range(60)]

            async def meanwhile() -> str:
                await waiting(shared_gateway, 60)
                for _ in range(3):
                    began = time.monotonic()
                    await called(a, "get_my_messages")
                    await called(a, "update_my_status", status="working")
                    assert time.monotonic() - began < SOON_S
                return await sent(a, ann.name, "to all of them")

            *found, message_id = await at_once(*waits, meanwhile)
            assert [ids(one) for one in found] == [[message_id]] * 60

    anyio.run(talk)
    assert waits_at(shared_gateway) == 0


def test_a_gateway_that_stops_ends_the_waits_with_an_error_that_says_so(
    start_gateway: Callable[..., McpGateway], tmp_path: Path
) -> None:
    gateway = start_gateway()
    with gateway.client() as operator:
        ann = Agent("ann", tmp_path).joined(operator)
    results: dict[str, Any] = {}

    async def talk() -> None:
        async with ann.client(gateway) as a:

            async def call(tool: str) -> None:
                results[tool] = await a.call_tool(tool, WAITING[tool])

            async def stop() -> None:
                await waiting(gateway, 3)
                assert await anyio.to_thread.run_sync(gateway.program.stop) == 0

            began = time.monotonic()
            await at_once(*(partial(call, tool) for tool in WAITING), stop)
            assert time.monotonic() - began < 30

    anyio.run(talk)
    for tool, found in results.items():
        assert found.is_error, tool
        assert found.structured_content["reason"] == "unreachable"
        assert "the gateway stops" in found.structured_content["message"]
    assert "Traceback" not in gateway.program.log()


def keys_of(name: str) -> AgentKeys:
    """The keys of one agent."""
    keys = AgentKeys()
    keys.load([AgentKeyRow(name, "k1", "", "active", 1, None, None)])
    return keys


async def answered(app: Any, leave: anyio.Event | None = None, **more: Any) -> list[dict[str, Any]]:
    """The messages that `WaitingCalls` around an application sends for a call of a tool that waits."""
    sent_messages: list[dict[str, Any]] = []
    received = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (first := next(received, None)) is not None:
            return first
        await (leave or anyio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent_messages.append(message)

    with anyio.fail_after(10):
        scope = {"type": "http", TOOL: "waits", PRINCIPAL: "ann", **more}
        await WaitingCalls(app, {"waits"}, keys_of("ann"), ping_s=0.05)(scope, receive, send)
    return sent_messages


def test_a_long_wait_is_answered_with_spaces_before_its_document() -> None:
    document = {"jsonrpc": "2.0", "id": 1, "result": {}}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}"
        await anyio.sleep(scope.get("sleep_s", 0.3))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"99")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(document).encode()})

    begun, *parts = anyio.run(answered, app)
    assert (begun["status"], begun["headers"]) == (200, [(b"content-type", b"application/json")])
    body = b"".join(part["body"] for part in parts)
    assert body.startswith(b"  ") and json.loads(body) == document
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]


def test_a_call_is_cancelled_when_its_client_leaves() -> None:
    leave = anyio.Event()
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            leave.set()
            await anyio.sleep_forever()
        finally:
            seen.append("ended")

    assert anyio.run(answered, app, leave) == []
    assert seen == ["ended"]


async def with_defaults(agent: Agent, gateway: McpGateway, use: Callable[[Client], Any]) -> Any:
    """The result of `use` for the official client with the limits of its library, which only signs."""
    async with create_mcp_http_client(auth=SignedAuth(agent.name, AgentKey(agent.key_path))) as http:
        transport = streamable_http_client(f"{gateway.mcp_url}/mcp", http_client=http)
        async with Client(transport) as client:
            return await use(client)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_longest_wait_is_answered_to_all_clients(
    shared_gateway: McpGateway, new_agent: NewAgent, new_caller: NewCaller
) -> None:
    ann = new_agent("ann")

    async def wait(client: Client) -> float:
        began = time.monotonic()
        assert ids(await called(client, "wait_for_messages", timeoutSeconds=LONG_S)) == []
        return time.monotonic() - began

    async def by(transport: Any) -> float:
        async with agent_client(
            shared_gateway.mcp_url, ann.name, ann.key_path, transport=transport, call_s=20
        ) as client:
            return await wait(client)

    async def talk() -> list[float]:
        return await at_once(
            partial(by, "http"), partial(by, "sse"), partial(with_defaults, ann, shared_gateway, wait)
        )

    assert all(LONG_S <= took < LONG_S + 15 for took in anyio.run(talk))


@pytest.mark.slow
def test_a_client_that_reads_for_a_short_time_only_gets_a_message_that_comes_late(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")
    ann.client.timeout = 20

    def send() -> None:
        time.sleep(35)
        bo.call("send_to_agent", targetAgentId=ann.name, message="late")

    sender = threading.Thread(target=send)
    sender.start()
    body = call_body("lease_messages", timeoutSeconds=60)
    answer = ann.post(body)
    sender.join()
    assert answer.content.startswith(b"  ")
    assert [one["content"] for one in answer.json()["result"]["structuredContent"]["messages"]] == ["late"]
