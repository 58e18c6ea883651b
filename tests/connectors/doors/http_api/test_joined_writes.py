"""A real server of the gateway on a socket: how the bytes of its answers arrive."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from connectors.programs.gateway_program.application import Door
from connectors.programs.gateway_program.http_server import Budgets, HttpServer, bound_socket
from schemas.settings.settings import GatewaySettings
from tests.broker_processes import LOOPBACK

pytestmark = pytest.mark.requirement("ST-40")

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]}


async def whole(scope: Any, receive: Any, send: Any) -> None:
    """An answer with its body at once."""
    await send(START)
    await send({"type": "http.response.body", "body": b"answer"})


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """An answer whose body begins after its head."""
    await send(START)
    await asyncio.sleep(0.5)
    await send({"type": "http.response.body", "body": b"ans", "more_body": True})
    await send({"type": "http.response.body", "body": b"wer"})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An answer after the body of the request, by way of `receive`."""
    body, more = b"", True
    while more:
        part = await receive()
        body, more = body + part["body"], part["more_body"]
    await send({**START, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


async def ends(scope: Any, receive: Any, send: Any) -> None:
    """An answer that closes the connection."""
    await send({**START, "headers": [*START["headers"], (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"answer"})


async def breaks_off(scope: Any, receive: Any, send: Any) -> None:
    """An application that fails after the head of its answer."""
    await send(START)
    raise RuntimeError("broken")


def arrivals(app: Any, *sent: bytes, wait_s: float = 1.5) -> list[tuple[float, bytes]]:
    """Return the reads of a client with their times in seconds, until the connection ends or is silent."""

    async def run() -> list[tuple[float, bytes]]:
        door = Door("test", app, LOOPBACK, 0, "test")
        budgets = Budgets(GatewaySettings(), 1, time.monotonic)
        server = HttpServer(door, None, budgets, 5)
        with bound_socket(door) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            found, began = [], time.monotonic()
            try:
                for number, part in enumerate(sent):
                    await asyncio.sleep(0.2 * bool(number))
                    writer.write(part)
                    await writer.drain()
                while data := await asyncio.wait_for(reader.read(65536), wait_s):
                    found.append((time.monotonic() - began, data))
            except TimeoutError:
                pass
            writer.close()
            server.should_exit = True
            await serving
            return found

    return asyncio.run(run())


@pytest.mark.long
def test_head_and_body_that_are_there_together_are_one_write(monkeypatch):
    written = []

    def noted(self: Any, data: bytes) -> None:
        written.append(bytes(data))
        write(self, data)

    write = asyncio.selector_events._SelectorSocketTransport.write
    monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write", noted)
    ((_, answer),) = arrivals(whole, GET)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\nanswer")
    assert [one for one in written if one] == [GET, answer]


@pytest.mark.long
def test_the_head_of_a_stream_does_not_wait_for_its_first_event():
    (_, head), *rest = arrivals(stream, GET)
    assert head.startswith(b"HTTP/1.1 200 ") and head.endswith(b"\r\n\r\n")
    assert b"".join(data for _, data in rest) == b"answer"


@pytest.mark.long
def test_each_of_several_requests_on_one_connection_has_a_whole_answer():
    found = b"".join(data for _, data in arrivals(whole, GET * 3, GET))
    assert found.count(b"HTTP/1.1 200 ") == found.count(b"\r\n\r\nanswer") == 4


def test_a_connection_that_is_to_end_ends_after_the_whole_answer():
    found = arrivals(ends, GET)
    assert b"".join(data for _, data in found).endswith(b"\r\n\r\nanswer")
    assert found[-1][0] < 1.0


def test_the_head_of_a_broken_answer_arrives_before_the_connection_ends():
    found = b"".join(data for _, data in arrivals(breaks_off, GET))
    assert found.startswith(b"HTTP/1.1 200 ") and found.endswith(b"\r\n\r\n")


@pytest.mark.long
@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n", b"expect: 100-Continue\r\n"])
def test_a_client_that_expects_to_continue_is_told_so_before_its_body(expects):
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n" + expects + b"\r\n"
    found = b"".join(data for _, data in arrivals(echo, head, b"body"))
    assert found.startswith(b"HTTP/1.1 100 " if expects else b"HTTP/1.1 200 ")
    assert found.endswith(b"\r\n\r\nbody")
