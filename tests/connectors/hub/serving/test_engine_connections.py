"""The connections of the engine are bounded, timed and ended as all others are (ST-99).

The engine here answers when the test lets it, so that a request can be held in any of its states.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from connectors.hub.engine.direct_http import Exchange
from connectors.hub.serving.bounded_http import IS_STREAM
from connectors.hub.serving.connection_budget import Phase
from connectors.hub.serving.strict_http import HEAD_BYTES
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.served_application import HOST, get, rest, served, statuses

pytestmark = pytest.mark.requirement("ST-99")

LINE = b"GET /first HTTP/1.1"
BODY = b"x" * 60_000


class HeldEngine:
    """An engine for one request line, which does with each request what the test says."""

    def __init__(self, do: Callable[[Exchange], None] | None = None) -> None:
        self.begun: list[Exchange] = []
        self.left: list[Exchange] = []
        self._do = do

    def find(self, line: bytes) -> tuple[Any, tuple[bytes, ...], bytes]:
        """As of the engine."""
        return (object() if line == LINE else None), (), b""

    def admit(self, exchange: Exchange) -> bool:
        """As of the engine."""
        return exchange.connection.admits("somebody", is_operator=False)

    def begin(self, exchange: Exchange) -> None:
        """As of the engine."""
        self.begun.append(exchange)
        if self._do is not None:
            self._do(exchange)

    def leave(self, exchange: Exchange) -> None:
        """As of the engine."""
        self.left.append(exchange)


def answer(exchange: Exchange, body: bytes = b"direct") -> None:
    """Answer by the engine."""
    exchange.connection.answer(200, b"content-length: %d\r\n" % len(body), body)


async def careful(scope: Any, receive: Any, send: Any) -> None:
    """The careful path. `/stream` counts as a stream until its connection ends."""
    scope[IS_STREAM] = scope["path"] == "/stream"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
    await send({"type": "http.response.body", "body": b"careful"})


@pytest.mark.long
@pytest.mark.parametrize("before", [b"", get(line=b"GET /stream HTTP/1.1")])
def test_a_client_that_reads_no_answers_of_the_engine_is_found_and_holds_up_no_sweep(before: bytes) -> None:
    engine = HeldEngine(lambda exchange: answer(exchange, BODY))
    with served(careful, engine=engine) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        if before:
            connection.sendall(before)
            while b"careful" not in connection.recv(4096):
                pass
        held = server.only_connection()
        for number in range(200):
            connection.sendall(get())
            wait_until(lambda number=number: len(engine.begun) > number or held.flow.write_paused)
            if held.flow.write_paused:
                break
        assert held.flow.write_paused
        assert held.phase()[0] is Phase.UNREAD


def test_a_request_that_the_engine_passes_on_while_the_server_ends_is_the_last_of_its_connection() -> None:
    engine = HeldEngine()
    with served(careful, engine=engine) as server, server.connect() as connection:
        connection.sendall(get())
        wait_until(lambda: engine.begun, what="the request")
        server.server.should_exit = True
        held = server.only_connection()
        wait_until(lambda: held._ends, what="the end of the server")
        began = time.monotonic()
        connection.sendall(get())  # behind the one that is answered
        loop = held.loop
        loop.call_soon_threadsafe(held.pass_on, engine.begun[0])
        found = rest(connection)
        assert statuses(found) == [200] and b"connection: close" in found and found.endswith(b"careful")
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("more", range(-1, 6))
def test_both_ways_take_heads_of_the_same_length(more: int) -> None:
    engine = HeldEngine(answer)
    length = HEAD_BYTES - len(LINE + b"\r\n" + HOST + b"A: \r\n\r\n")
    with served(careful, engine=engine) as server, server.connect() as connection:
        connection.sendall(get(b"A: " + b"x" * (length + more)))
        expected = 200 if more <= 0 else 431
        assert statuses(connection.recv(65536)) == [expected]
        assert len(engine.begun) == (more <= 0)


def test_requests_behind_one_that_is_passed_on_are_answered_in_their_order() -> None:
    engine = HeldEngine()
    with served(careful, engine=engine) as server, server.connect() as connection:
        connection.sendall(get())
        wait_until(lambda: engine.begun, what="the request")
        held = server.only_connection()
        connection.sendall(get() + get(b"Connection: close", line=b"GET /last HTTP/1.1"))
        wait_until(lambda: held.unread, what="the others")
        held.loop.call_soon_threadsafe(held.pass_on, engine.begun[0])
        assert rest(connection).count(b"careful") == 3
    assert len(engine.begun) == 1


def test_requests_that_come_during_an_answer_are_answered_after_it_and_reading_goes_on() -> None:
    engine = HeldEngine()
    with served(careful, engine=engine) as server, server.connect() as connection:
        connection.sendall(get())
        wait_until(lambda: engine.begun, what="the request")
        held = server.only_connection()
        connection.sendall(get(line=b"GET /next HTTP/1.1") + get())
        wait_until(lambda: held.unread, what="the others")
        held.loop.call_soon_threadsafe(answer, engine.begun[0])
        received = b""
        while received.count(b"direct") + received.count(b"careful") < 3:
            received += connection.recv(65536)
        connection.sendall(get(b"Connection: close", line=b"GET /last HTTP/1.1"))
        assert rest(connection).count(b"careful") == 1


@pytest.mark.long
def test_the_time_of_an_idle_connection_stops_with_each_request_and_begins_with_its_answer() -> None:
    engine = HeldEngine()
    with served(careful, engine=engine, idle_timeout_s=1) as server, server.connect() as connection:
        # One answer takes longer than the idle time, which begins anew after the last one.
        for number, takes_s in enumerate((0, 1.2, 0.6)):
            connection.sendall(get())
            wait_until(lambda number=number: len(engine.begun) > number, what="the request")
            held = server.only_connection()
            assert held.phase()[0] is Phase.ANSWERING
            time.sleep(takes_s)
            held.loop.call_soon_threadsafe(answer, engine.begun[-1])
            assert connection.recv(65536).endswith(b"direct")
            answered_at = time.monotonic()
            wait_until(lambda held=held: held.phase()[0] is Phase.IDLE, what="the idle time")
        assert rest(connection) == b""
        assert time.monotonic() - answered_at > 0.9


def test_the_connection_of_a_request_counts_as_its_principals_own() -> None:
    engine = HeldEngine(answer)
    with served(careful, engine=engine) as server, server.connect() as connection:
        connection.sendall(get())
        assert connection.recv(65536).endswith(b"direct")
        place = server.only_connection()._place
        assert place is not None and place.principal == "somebody"


def test_an_answer_while_the_server_ends_is_the_last_of_its_connection() -> None:
    engine = HeldEngine()
    with served(careful, engine=engine) as server, server.connect() as connection:
        connection.sendall(get())
        wait_until(lambda: engine.begun, what="the request")
        server.server.should_exit = True
        held = server.only_connection()
        wait_until(lambda: held._ends, what="the end of the server")
        began = time.monotonic()
        held.loop.call_soon_threadsafe(answer, engine.begun[0])
        found = rest(connection)
        assert b"connection: close" in found and found.endswith(b"direct")
        assert time.monotonic() - began < 3


def test_an_answer_for_a_client_that_left_goes_nowhere() -> None:
    engine = HeldEngine()
    with served(careful, engine=engine) as server:
        with server.connect() as connection:
            connection.sendall(get())
            wait_until(lambda: engine.begun, what="the request")
            held = server.only_connection()
        wait_until(lambda: not server.connections, what="the end of the connection")
        assert engine.left == engine.begun
        assert not engine.begun[0].connection.is_heard()
        for late in (held.pass_on, answer):
            held.loop.call_soon_threadsafe(late, engine.begun[0])
        wait_until(lambda: held._exchange is None, what="the late answer")


def test_requests_in_pieces_and_several_in_one_packet_are_answered_in_their_order_by_the_careful_path() -> None:
    engine = HeldEngine(answer)
    last = get(b"Connection: close", line=b"GET /last HTTP/1.1")
    with served(careful, engine=engine) as server:
        for sent, piece in ((get() + last, 7), (get() + get() + last, 0), (get()[:-1] + get()[-1:] + last, 1)):
            found = server.exchange(sent, piece)
            assert found.count(b"HTTP/1.1 200") == found.count(b"careful") == sent.count(b"HTTP/1.1")
        with server.connect() as connection:
            connection.sendall(get())
            assert connection.recv(65536).endswith(b"direct")
            connection.sendall(get()[:9])
            held = server.only_connection()
            wait_until(lambda: held.unread, what="the first piece")
            assert held.phase()[0] is Phase.HEAD
            connection.sendall(get()[9:])
            assert connection.recv(65536).endswith(b"careful")
    assert len(engine.begun) == 1
