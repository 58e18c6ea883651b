"""Requests of agents over plain HTTP, signed by hand, so that a test can spoil one part of them at a time."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import httpx

from schemas.settings.settings import Settings
from tests.agent_signatures import signed_headers
from tests.connectors.doors.http_api.hub_access import TIMEOUT_S
from tests.mcp_protocol import INITIALIZE
from tests.raw_records import read_to_end
from trunkline_agent.mcp.signing import load_private_key

if TYPE_CHECKING:
    from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway

MCP = "/mcp"
ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
_numbers = itertools.count(1)


def call_document(tool: str, **arguments: Any) -> dict[str, Any]:
    """A `tools/call`, each with another id, so that no two have the same bytes."""
    params = {"name": tool, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": next(_numbers), "method": "tools/call", "params": params}


def call_body(tool: str, **arguments: Any) -> bytes:
    """The same as bytes."""
    return json.dumps(call_document(tool, **arguments)).encode()


def now(offset_s: float = 0) -> str:
    """A timestamp."""
    return str(int(time.time() + offset_s))


class SignedCaller:
    """One agent at one gateway, without the official client. A context manager."""

    def __init__(self, agent: Agent, gateway: McpGateway) -> None:
        self.name = agent.name
        self._key = load_private_key(agent.key_path.read_bytes())
        self.client = httpx.Client(base_url=gateway.mcp_url, timeout=TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def headers(self, body: bytes = b"", timestamp: str | None = None) -> dict[str, str]:
        """The three headers for a body."""
        return signed_headers(self.name, self._key, body, timestamp or now())

    def post(self, body: bytes, headers: Any = None, path: str = MCP, **more: str) -> httpx.Response:
        """Post a body; `headers` in place of the right three, `more` beside them."""
        signed = self.headers(body) if headers is None else headers
        given = [*(ACCEPT | more).items(), *(signed.items() if isinstance(signed, dict) else signed)]
        return self.client.post(path, content=body, headers=given)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer of a tool, which must not be an error."""
        found = self.tool(tool, **arguments)
        assert not found.get("isError"), found
        return dict(found["structuredContent"])

    def tool(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The result of a call, which may be an error of the tool."""
        answer = self.post(call_body(tool, **arguments))
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["result"])

    def error(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The reason and the message of a call that the tool refuses."""
        found = self.tool(tool, **arguments)
        assert found["isError"], found
        return dict(found["structuredContent"])

    def messages(self, **arguments: Any) -> list[dict[str, Any]]:
        """The agent's messages."""
        return list(self.call("get_my_messages", **arguments)["messages"])


class Stream:
    """An open SSE connection: where to post, and what comes."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.iter_lines()
        name, self.path = self.event()
        assert name == "endpoint"

    def event(self) -> tuple[str, str]:
        """The next event: its name and its data. Fails when nothing but pings comes for long."""
        name, deadline = "", time.monotonic() + 2 * TIMEOUT_S
        for line in self._lines:
            assert time.monotonic() < deadline, "nothing but pings"
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                return name, value
        return "end", ""

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        name, data = self.event()
        assert name == "message", name
        return dict(json.loads(data))


def first_words(caller: SignedCaller, path: str) -> None:
    """Open the session of a stream as the protocol has it; its answer comes on the stream."""
    first = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE}
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    for document in (first, ready):
        assert caller.post(json.dumps(document).encode(), path=path).status_code == 202


@contextmanager
def open_stream(caller: SignedCaller) -> Iterator[Stream]:
    """A connection at `/sse`, in which the protocol's first words are said."""
    with caller.client.stream("GET", "/sse", headers=caller.headers()) as answer:
        assert answer.status_code == 200, answer.read()
        stream = Stream(answer)
        first_words(caller, stream.path)
        assert stream.answer()["result"]["serverInfo"]["name"] == "trunkline"
        yield stream


def logged(settings: Settings, record_type: str) -> list[Any]:
    """The log's records of one type, as Kafka has them."""
    wanted = record_type.encode()
    return [one for one in read_to_end(settings.kafka) if dict(one.headers).get("ce_type") == wanted]
