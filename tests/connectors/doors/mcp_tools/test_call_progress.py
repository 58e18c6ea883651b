"""Reports of progress for calls of tools that wait (AM-14)."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from connectors.doors.mcp_tools.agents.signed_requests import DOCUMENT
from tests.connectors.doors.mcp_tools.conftest import McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import at_once
from tests.connectors.doors.mcp_tools.test_waiting_calls import WAITING, NewAgent, answered

pytestmark = pytest.mark.requirement("AM-14")

EVENTS = [(b"accept", b"application/json, text/event-stream")]


def asked(token: Any, headers: Any = EVENTS) -> dict[str, Any]:
    """The scope of a call whose client gives a token for reports of progress."""
    return {DOCUMENT: {"params": {"name": "waits", "_meta": {"progressToken": token}}}, "headers": headers}


@pytest.mark.parametrize("token", ["t-1", 7])
def test_a_long_wait_reports_progress_to_the_token_of_its_client_and_ends_with_the_answer(token: Any) -> None:
    document = {"jsonrpc": "2.0", "id": 1, "result": {"text": "x"}}
    sent_body = json.dumps(document).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anyio.sleep(0.3)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": sent_body[:9], "more_body": True})
        await send({"type": "http.response.body", "body": sent_body[9:]})

    begun, *parts = anyio.run(partial(answered, app, **asked(token)))
    assert (b"content-type", b"text/event-stream") in begun["headers"]
    events = b"".join(part["body"] for part in parts).split(b"\n\n")
    assert events.pop() == b""
    found = [json.loads(one.removeprefix(b"event: message\ndata: ")) for one in events]
    assert found.pop() == document
    assert len(found) >= 2
    assert {(one["method"], one["params"]["progressToken"]) for one in found} == {
        ("notifications/progress", token)
    }
    progress = [one["params"]["progress"] for one in found]
    assert progress == sorted(set(progress))
    assert not parts[-1].get("more_body", False)


@pytest.mark.parametrize(
    ("scope", "sleep_s"),
    [
        (asked("t"), 0),
        (asked(True), 0.2),
        (asked(None), 0.2),
        (asked("t", [(b"accept", b"application/json")]), 0.2),
        ({DOCUMENT: {"params": []}, "headers": EVENTS}, 0.2),
    ],
    ids=["at once", "no token", "null", "JSON alone", "no parameters"],
)
def test_an_answer_is_json_if_it_comes_at_once_or_its_client_wants_no_progress(
    scope: dict[str, Any], sleep_s: float
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anyio.sleep(sleep_s)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    begun, *parts = anyio.run(partial(answered, app, **scope))
    assert begun["headers"] == [(b"content-type", b"application/json")]
    assert json.loads(b"".join(part["body"] for part in parts)) == {}


def test_each_tool_that_waits_reports_progress_on_all_transports(
    shared_gateway: McpGateway, new_agent: NewAgent
) -> None:
    ann = new_agent("ann")
    reports: dict[tuple[str, str], list[float]] = {}

    async def wait(client: Client, transport: str, tool: str) -> None:
        async def note(progress: float, total: float | None, message: str | None) -> None:
            reports.setdefault((transport, tool), []).append(progress)

        arguments = {**WAITING[tool], "timeoutSeconds": 17}
        assert not (await client.call_tool(tool, arguments, progress_callback=note)).is_error

    async def by(transport: str, opened: Any) -> None:
        async with opened as client:
            await at_once(*(partial(wait, client, transport, tool) for tool in WAITING))

    program = StdioServerParameters(
        command=sys.executable,
        args=["-m", "trunkline_agent.mcp"],
        env={
            "AGENT_ID": ann.name,
            "AGENT_KEY_PATH": str(ann.key_path),
            "MCP_SERVER_URL": shared_gateway.mcp_url,
            "PYTHONPATH": os.environ["PYTHONPATH"],
        },
    )

    async def talk() -> None:
        await at_once(
            *(partial(by, transport, ann.client(shared_gateway, transport)) for transport in ("http", "sse")),
            partial(by, "stdio", Client(stdio_client(program))),
        )

    anyio.run(talk)
    assert len(reports) == 9
    assert all(len(found) == 1 and 14 < found[0] < 17 for found in reports.values()), reports
