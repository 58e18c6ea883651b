"""SSE connections at the agent MCP door (AM-01): whose they are, how many, what a silent reader may cost."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import psutil
import pytest

from tests.broker_processes import LOOPBACK, wait_until
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body, first_words, open_stream

pytestmark = pytest.mark.requirement("AM-01")

NewCaller = Callable[[str], SignedCaller]
MIB = 1024 * 1024


def test_only_who_opened_a_stream_may_post_to_it(new_caller: NewCaller) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")
    ann.call("send_to_agent", targetAgentId=ann.name, message="ann's own")
    with open_stream(ann) as stream, open_stream(bo) as other:
        for path in (stream.path, other.path + "&session_id=" + stream.path[-32:]):
            answer = bo.post(call_body("get_my_messages"), path=path)
            assert answer.status_code == 404
        unknown = bo.post(call_body("get_my_messages"), path="/messages/?session_id=" + "0" * 32)
        assert (unknown.status_code, unknown.text) == (answer.status_code, answer.text)
        body = call_body("get_my_messages")
        assert ann.post(body, path=stream.path).status_code == 202
        found = stream.answer()
        assert found["id"] == json.loads(body)["id"]
        assert [one["content"] for one in found["result"]["structuredContent"]["messages"]] == ["ann's own"]


@pytest.mark.requirement("AM-02")
def test_a_changing_call_has_one_signature_on_both_transports(new_caller: NewCaller) -> None:
    ann = new_caller("ann")
    with open_stream(ann) as stream:
        body = call_body("send_to_agent", targetAgentId=ann.name, message="once")
        headers = ann.headers(body)
        assert ann.post(body, headers, stream.path).status_code == 202
        assert not stream.answer()["result"].get("isError")
        assert ann.post(body, headers, stream.path).status_code == 403
        assert ann.post(body, headers).status_code == 403
    assert len(ann.messages()) == 1


def test_an_agent_has_few_streams_at_once(new_caller: NewCaller) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")
    with ExitStack() as streams:
        opened = [streams.enter_context(open_stream(ann)) for _ in range(8)]
        assert len({stream.path for stream in opened}) == 8
        with ann.client.stream("GET", "/sse", headers=ann.headers()) as answer:
            assert answer.status_code == 429
            assert json.loads(answer.read())["reason"] == "busy"
            assert "Retry-After" in answer.headers
        with open_stream(bo):
            pass

    def is_free() -> bool:
        with ann.client.stream("GET", "/sse", headers=ann.headers()) as answer:
            return answer.status_code == 200

    wait_until(is_free, what="the end of the streams")


def silent_stream(caller: SignedCaller) -> tuple[socket.socket, str]:
    """A connection that is opened and then not read any more, and where to post to it."""
    port = urlsplit(str(caller.client.base_url)).port
    assert port is not None
    connection = socket.create_connection((LOOPBACK, port), timeout=20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = "".join(f"{name}: {value}\r\n" for name, value in caller.headers().items())
    connection.sendall(f"GET /sse HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\n{head}\r\n".encode())
    said = b""
    while b"session_id=" not in said or b"\n" not in said.partition(b"session_id=")[2]:
        said += connection.recv(1024)
    session = said.partition(b"session_id=")[2].split()[0].decode()
    path = f"/messages/?session_id={session}"
    first_words(caller, path)
    return connection, path


def test_a_silent_reader_is_given_no_more_and_is_cut_off(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann = new_caller("ann")
    for _ in range(4):  # each is as long as an event may be
        ann.call("send_to_agent", targetAgentId=ann.name, message="x" * (240 * 1024))
    gateway = psutil.Process(shared_gateway.program.process.pid)
    before = gateway.memory_info().rss
    connection, path = silent_stream(ann)
    with closing(connection):
        began = time.monotonic()
        seen = set()

        def status() -> int:
            seen.add(found := ann.post(call_body("get_my_messages"), path=path).status_code)
            return found

        wait_until(lambda: status() == 429, what="that it is given no more")
        wait_until(lambda: status() == 404, what="that it is cut off")
        assert time.monotonic() - began < 30
        assert seen == {202, 429, 404}
        # 32 answers of half a MiB, twice over while they are written; without a bound it would be thousands.
        assert gateway.memory_info().rss - before < 200 * MIB
    assert len(ann.messages()) == 4


def test_the_gateway_ends_in_order_while_streams_are_open(
    start_gateway: Callable[..., McpGateway], tmp_path_factory: pytest.TempPathFactory
) -> None:
    gateway = start_gateway()
    with gateway.client() as operator:
        agent = Agent("ann", tmp_path_factory.mktemp("key")).joined(operator)
    with SignedCaller(agent, gateway) as ann, open_stream(ann) as stream:
        began = time.monotonic()
        assert gateway.program.stop() == 0
        assert time.monotonic() - began < 12
        assert stream.event() == ("end", "")
    assert "Traceback" not in gateway.program.log()
