"""The tools that wait, lease and ask by the agent client and the stdio wrapper, also after lost answers."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.types import REQUEST_TIMEOUT

from schemas.streams.agents.agent_registry import AGENT_CALLED
from tests.broker_processes import LOOPBACK
from tests.connectors.agent_sdk.signed_mcp.test_stdio_wrapper import COMMAND, call, environment, wrapped
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import (
    WAIT_S,
    at_once,
    called,
    ids,
    sent,
    wait_for_waits,
    waiting,
)
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, logged
from tests.mcp_protocol import ENVELOPE, INITIALIZE
from tests.tcp_proxy import LOSE, PASS, TcpProxy
from trunkline_agent.mcp import UNREACHABLE, agent_client

pytestmark = [
    pytest.mark.requirement("DL-09"),
    pytest.mark.requirement("AM-10"),
    pytest.mark.timeout(120),
]

NewAgent = Callable[[str], Agent]
NewCaller = Callable[[str], SignedCaller]
SOON_S = 3


def by_stdio(agent: Agent, gateway: McpGateway, mode: Any) -> Client:
    """The official client, connected to the stdio wrapper as a command."""
    command = StdioServerParameters(
        command=COMMAND[0], args=list(COMMAND[1:]), env=environment(gateway.mcp_url, agent.key_path, agent.name)
    )
    return Client(command, mode=mode)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_official_client_waits_leases_and_asks_over_stdio_by_either_protocol(
    shared_gateway: McpGateway, new_agent: NewAgent, mode: str
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")

    async def talk() -> None:
        async with by_stdio(ann, shared_gateway, mode) as a, bo.client(shared_gateway) as b:
            assert (a.protocol_version >= "2026") == (mode == "auto")

            async def work() -> tuple[str, str]:
                await waiting(shared_gateway, 2)
                # A wait holds up no other call of the same wrapper.
                assert ids(await called(a, "get_my_messages")) == []
                (asked,) = (await called(b, "lease_messages", timeoutSeconds=WAIT_S))["messages"]
                fields = {"inReplyTo": asked["id"], "thread": asked["thread"]}
                reply_id = await sent(b, ann.name, "42", **fields)
                return reply_id, await sent(b, ann.name, "work")

            question = {"targetAgentId": bo.name, "message": "6 * 7?", "thread": "sums"}
            asking = partial(called, a, "ask_agent", **question, timeoutSeconds=WAIT_S)
            wait = partial(called, a, "wait_for_messages", timeoutSeconds=WAIT_S)
            found, answer, (reply_id, second) = await at_once(wait, asking, work)
            assert (answer["reply"]["id"], answer["reply"]["thread"]) == (reply_id, "sums")
            # The wait sees the reply, if it is faster than the asker.
            assert ids(found)[0] in (reply_id, second)
            lease = await called(a, "lease_messages", timeoutSeconds=WAIT_S)
            assert ids(lease) == [second]
            leased = {"leaseId": lease["leaseId"], "messageIds": [second]}
            assert (await called(a, "extend_lease", **leased, leaseSeconds=60))["done"] == [second]
            given = {"leaseId": lease["leaseId"], "messageId": second}
            assert (await called(a, "nack_message", **given))["done"] == [second]
            lease = await called(a, "lease_messages")
            leased["leaseId"] = lease["leaseId"]
            assert (await called(a, "ack_messages", **leased))["done"] == [second]

    anyio.run(talk)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_call_that_is_cancelled_over_stdio_ends_its_wait_at_once(
    shared_gateway: McpGateway, new_agent: NewAgent, mode: str
) -> None:
    ann = new_agent("ann")

    async def talk() -> None:
        async with by_stdio(ann, shared_gateway, mode) as a:
            for tool in ("wait_for_messages", "lease_messages"):
                with pytest.raises(MCPError) as late:
                    await a.call_tool(tool, {"timeoutSeconds": 240}, read_timeout_seconds=2)
                assert late.value.code == REQUEST_TIMEOUT
                assert await waiting(shared_gateway, 0) < SOON_S, tool
            message_id = await sent(a, ann.name, "for the next one")
            lease = await called(a, "lease_messages")
            assert [(one["id"], one["attempt"]) for one in lease["messages"]] == [(message_id, 1)]

    anyio.run(talk)


@pytest.mark.parametrize("version", ["2026-07-28", "2025-06-18"])
def test_a_cancelled_call_is_not_answered_and_a_wrapper_that_ends_ends_its_waits(
    shared_gateway: McpGateway, new_agent: NewAgent, version: str
) -> None:
    ann = new_agent("ann")
    is_old = version < "2026"

    def said(identity: int, tool: str, **arguments: Any) -> dict[str, Any]:
        document = call(identity, tool, **arguments)
        if is_old:
            del document["params"]["_meta"]
        return document

    with wrapped(shared_gateway.mcp_url, ann.key_path, ann.name) as wrapper:
        if is_old:
            wrapper.say({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE})
            assert wrapper.hear()["result"]["protocolVersion"] == version
            wrapper.say({"jsonrpc": "2.0", "method": "notifications/initialized"})
        wrapper.say(said(1, "wait_for_messages", timeoutSeconds=240))
        wait_for_waits(shared_gateway, 1)
        cancelled = {"requestId": 1, **({} if is_old else {"_meta": dict(ENVELOPE)})}
        wrapper.say({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": cancelled})
        assert wait_for_waits(shared_gateway, 0) < SOON_S
        # The next line of its output is the answer to the next request.
        wrapper.say(said(2, "get_my_messages"))
        assert wrapper.hear()["id"] == 2
        wrapper.say(said(3, "lease_messages", timeoutSeconds=240))
        wait_for_waits(shared_gateway, 1)
        assert wrapper.process.stdin is not None
        wrapper.process.stdin.close()
        last = wrapper.hear()
        assert (last["id"], last["error"]["code"]) == (3, UNREACHABLE)
        assert wrapper.process.wait(20) == 0
    assert wait_for_waits(shared_gateway, 0) < SOON_S
    with wrapped(shared_gateway.mcp_url, ann.key_path, ann.name) as wrapper:
        wrapper.say(call(1, "lease_messages", timeoutSeconds=240))
        wait_for_waits(shared_gateway, 1)
        wrapper.process.kill()
        assert wait_for_waits(shared_gateway, 0) < SOON_S


@pytest.mark.parametrize("transport", ["http", "sse"])
def test_a_wait_does_not_count_as_time_without_an_answer(
    shared_gateway: McpGateway, new_agent: NewAgent, transport: Any
) -> None:
    ann = new_agent("ann")

    async def talk() -> None:
        address = (shared_gateway.mcp_url, ann.name, ann.key_path)
        async with agent_client(*address, transport=transport, call_s=2) as a:
            began = time.monotonic()
            assert ids(await called(a, "wait_for_messages", timeoutSeconds=4)) == []
            assert time.monotonic() - began >= 4
            with pytest.raises(MCPError) as late:
                await a.call_tool("wait_for_messages", {"timeoutSeconds": 4}, read_timeout_seconds=1)
            assert late.value.code == REQUEST_TIMEOUT

    anyio.run(talk)


def test_each_call_whose_answer_was_lost_is_repeated_with_one_effect(
    shared_gateway: McpGateway, new_agent: NewAgent
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")

    async def talk(proxy: TcpProxy) -> None:
        url = f"http://{LOOPBACK}:{proxy.port}"
        async with agent_client(url, ann.name, ann.key_path) as a, bo.client(shared_gateway) as b:

            async def twice(tool: str, **arguments: Any) -> dict[str, Any]:
                proxy.mode = LOSE
                with pytest.raises(MCPError) as lost:
                    await a.call_tool(tool, arguments)
                assert (lost.value.code, proxy.mode) == (UNREACHABLE, PASS), tool
                return await called(a, tool, **arguments)

            one, two = [await sent(b, ann.name, text) for text in ("one", "two")]
            lease = await twice("lease_messages", idempotencyKey="l1")
            assert [(m["id"], m["attempt"]) for m in lease["messages"]] == [(one, 1), (two, 1)]
            leased = {"leaseId": lease["leaseId"], "messageIds": [one]}
            extended = await twice("extend_lease", **leased, leaseSeconds=600, idempotencyKey="x1")
            assert extended == {"done": [one], "refused": []}
            assert await twice("ack_messages", **leased) == {"done": [one], "refused": []}
            given = {"leaseId": lease["leaseId"], "messageId": two, "reason": "no"}
            assert await twice("nack_message", **given) == {"done": [two], "refused": []}
            assert ids(await twice("wait_for_messages")) == [two]
            question = {"targetAgentId": bo.name, "message": "?", "idempotencyKey": "q1"}
            asked = await twice("ask_agent", **question, timeoutSeconds=0)
            await sent(b, ann.name, "yes", inReplyTo=asked["messageId"])
            answer = await twice("ask_agent", **question, timeoutSeconds=WAIT_S)
            assert (answer["messageId"], answer["reply"]["content"]) == (asked["messageId"], "yes")
            assert ids(await called(b, "get_my_messages")) == [asked["messageId"]]
            again = await called(a, "lease_messages")
            assert [(m["id"], m["attempt"]) for m in again["messages"]] == [(two, 2)]

    target = int(shared_gateway.mcp_url.rpartition(":")[2])
    with contextlib.closing(TcpProxy(socket.create_server((LOOPBACK, 0)), target)) as proxy:
        anyio.run(talk, proxy)
    # The client sent each request once: two for each call of ours that changes something, and the last lease.
    bodies = [json.loads(one.value) for one in logged(shared_gateway.settings, AGENT_CALLED)]
    tools = [body["tool"] for body in bodies if body["agent_name"] == ann.name]
    expected = {"extend_lease": 2, "ack_messages": 2, "nack_message": 2, "lease_messages": 3, "ask_agent": 4}
    assert {tool: tools.count(tool) for tool in tools} == expected
