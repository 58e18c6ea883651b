"""`LeanCalls` answers calls of tools with the same bytes as the `mcp` library, and leaves the rest to it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp

from connectors.doors.mcp_tools.agents.direct_calls import LeanCalls
from connectors.doors.mcp_tools.agents.door import AgentMcp, _host_names, _security
from connectors.doors.mcp_tools.agents.mcp_tool import tool_error, tool_result
from connectors.doors.mcp_tools.agents.signed_requests import DOCUMENT, PRINCIPAL
from connectors.hub.live.live_view import LiveView
from connectors.hub.services.hub import Hub
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import Settings
from tests.mcp_protocol import INITIALIZE

pytestmark = pytest.mark.requirement("ST-41")

ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
CALL = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "mark_read", "arguments": {}}}
ANSWERS = {
    "mark_read": tool_result({"marked": 1, "unknown": ["é\u2028\U0001f600", '"\\\n'], "notMarked": []}),
    "discover_agents": tool_result({"agents": [{"id": "a", "status": None, "startedAt": 1_900_000_000_000}]}),
    "send_to_agent": tool_error("unknown_recipient", "no recipient of this name is known"),
    "get_my_messages": tool_result({"messages": [], "more": 0, "statistics": {"byAgent": {"b": 2}}}),
}


class Sides:
    """The application for signed calls twice: as `LeanCalls`, and as the library alone serves them."""

    def __init__(self, settings: Settings) -> None:
        keyring = ensure_keyring(settings)
        self.mcp = AgentMcp(Hub(settings, keyring, "t" * 32, LiveView(settings, keyring)))
        self.called: list[Any] = []
        self.mcp._result = self._result  # type: ignore[method-assign]
        self.library_alone = True
        self._library = StreamableHTTPASGIApp(self.mcp._streams)
        self._security = _security(_host_names(settings))

    async def _result(self, agent: str, params: Any) -> Any:
        self.called.append((agent, params.name, params.arguments))
        return ANSWERS[params.name]

    async def both(self, requests: list[tuple[Any, dict[str, str]]]) -> list[list[Any]]:
        """Return for each body and headers the answers and calls of both sides, first those of the library."""
        lean = LeanCalls(self._passed_on, self.mcp._called, self._security)
        found = []
        async with self.mcp._streams.run():
            for document, headers in requests:
                pair = []
                for app in (self._library, lean):
                    self.called.clear()
                    self.is_passed_on = False
                    pair.append((await self._ask(app, document, headers), list(self.called)))
                found.append([*pair, self.is_passed_on])
        return found

    async def _passed_on(self, scope: Any, receive: Any, send: Any) -> None:
        self.is_passed_on = True
        await self._library(scope, receive, send)

    async def _ask(self, app: Any, document: Any, headers: dict[str, str]) -> Any:
        async def signed(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, PRINCIPAL: "agent-1", DOCUMENT: document}, receive, send)

        transport = httpx.ASGITransport(signed)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:3100") as client:
            answer = await client.post("/mcp", content=json.dumps(document), headers=headers)
        return answer.status_code, answer.headers.multi_items(), answer.content


@pytest.fixture
def sides(tmp_path):
    """The application, not opened: no tool of it is reached."""
    return Sides(Settings(data_dir=tmp_path))


def called(**fields: Any) -> dict[str, Any]:
    return {**CALL, **fields}


def test_a_call_has_the_answer_of_the_library_byte_for_byte(sides):
    calls = [called(params={"name": name, "arguments": {"a": [1, None]}}) for name in ANSWERS]
    calls += [called(id=one) for one in ("a", "", "é", 0, -1, 2**53)]
    calls += [called(params={"name": "mark_read"}), called(params={"name": "mark_read", "arguments": None})]
    calls.append(called(params={"name": "nothing", "arguments": {}}))
    versions = ({}, {"mcp-protocol-version": "2025-06-18"}, {"mcp-protocol-version": "2025-03-26"})
    found = asyncio.run(sides.both([(one, ACCEPT | version) for one in calls for version in versions]))
    assert len(found) == 3 * len(calls)
    for library, lean, is_passed_on in found:
        assert lean == library
        assert lean[0][0] == 200 and not is_passed_on


def test_all_else_is_answered_by_the_library(sides):
    bodies = [
        INITIALIZE,
        {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
        {"jsonrpc": "2.0", "id": 1, "method": "ping"},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        called(jsonrpc="1.0"),
        called(id=None),
        called(id=True),
        called(id=1.5),
        called(id=[1]),
        called(more=1),
        called(params=None),
        called(params=[]),
        called(params={}),
        called(params={"name": 5}),
        called(params={"name": "mark_read", "arguments": []}),
        called(params={"name": "mark_read", "arguments": {}, "_meta": {"progressToken": 1}}),
        called(params={"name": "mark_read", "arguments": {}, "more": 1}),
        {name: value for name, value in CALL.items() if name != "id"},
        None,
    ]
    headers = [
        {},
        {"Accept": "application/json"},
        ACCEPT | {"Content-Type": "text/plain"},
        ACCEPT | {"Content-Type": "application/json; charset=utf-8"},
        ACCEPT | {"Accept": "text/event-stream"},
        ACCEPT | {"Host": "evil.example"},
        ACCEPT | {"Origin": "http://evil.example"},
        ACCEPT | {"mcp-protocol-version": "2026-07-28"},
        ACCEPT | {"mcp-protocol-version": "1999-01-01"},
    ]
    requests = [(one, ACCEPT) for one in bodies] + [(CALL, one) for one in headers]
    for (document, given), (library, lean, is_passed_on) in zip(
        requests, asyncio.run(sides.both(requests)), strict=True
    ):
        assert lean == library, (document, given)
        assert is_passed_on, (document, given)
