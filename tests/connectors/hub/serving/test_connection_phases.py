"""The phases, limits and times of a connection whose requests wait, do not end or end after their answer."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from starlette.requests import Request

from connectors.hub.engine.direct_http import Exchange
from connectors.hub.serving.bounded_http import BODY_PROGRESS
from connectors.hub.serving.connection_budget import Phase
from schemas.settings.settings import GatewaySettings
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.served_application import CHUNKED, get, post, rest, served, statuses

pytestmark = pytest.mark.requirement("ST-42")


class Gated:
    """An application that reads no body and answers when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/slow":
            await asyncio.sleep(1)
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.long
def test_pipelined_requests_wait_in_bounded_memory_and_are_answered_in_turn() -> None:
    app = Gated()
    with served(app) as server, server.connect() as connection:
        connection.settimeout(0.5)
        sent, number = 0, 0
        request = get()
        with pytest.raises(TimeoutError):
            while number < 1_000_000:
                sent += connection.send(request * 1000)
                number += 1000
        held = server.only_connection()
        assert app.begun == 1 and not held.pipeline
        assert len(held.unread) < 600_000 < sent
        assert held.phase()[0] is Phase.ANSWERING
        app.gate.set()
        connection.settimeout(10)
        found = b""
        while found.count(b"\r\n\r\nok") < 3000:
            found += connection.recv(65536)
        assert app.begun >= 3000


class AtOnce:
    """An engine that answers each request at once, with a body of so many bytes."""

    def __init__(self, size: int) -> None:
        self.size, self.bodies = size, list[bytes]()

    def find(self, request_line: bytes) -> tuple[Any, tuple[bytes, ...], bytes]:
        """Every request is for it."""
        return True, (), b""

    def admit(self, exchange: Exchange) -> bool:
        """Everybody may."""
        return True

    def begin(self, exchange: Exchange) -> None:
        """Answer."""
        self.bodies.append(exchange.body)
        body = bytes(self.size)
        exchange.connection.answer(200, b"content-length: %d\r\n" % len(body), body)

    def leave(self, exchange: Exchange) -> None:
        """Nothing waits."""


@pytest.mark.requirement("ST-97")
def test_a_body_that_follows_its_head_is_served_directly_and_a_later_one_carefully() -> None:
    app, engine = Gated(), AtOnce(2)
    app.gate.set()
    head = post(b"Content-Length: 4", body=b"")
    with served(app, engine=engine) as server, server.connect() as connection:
        connection.sendall(head + b"bo")
        held: Any = server.only_connection()
        wait_until(lambda: held._head or app.begun, what="the head")
        connection.sendall(b"dy")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert engine.bodies == [b"body"] or app.begun == 1
        begun = app.begun
        connection.sendall(head + b"bo")
        wait_until(lambda: app.begun == begun + 1, what="the careful path")
        assert held.phase()[0] in (Phase.BODY, Phase.IDLE)
        connection.sendall(b"dy")
        assert b"200" in connection.recv(65536)


class Asking:
    """An application that asks from time to time whether its client has disconnected, as waiting routes do."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_gone = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        await request.body()
        while not self.is_gone:
            self.is_gone = await request.is_disconnected()
            self.asked += 1
            await asyncio.sleep(0.01)


@pytest.mark.long
def test_requests_behind_one_that_asks_for_its_client_wait_in_bounded_memory() -> None:
    app = Asking()
    with served(app) as server, server.connect() as connection:
        connection.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 60_000_000:
                sent += connection.send(get() * 1000)
        held, asked = server.only_connection(), app.asked
        wait_until(lambda: app.asked > asked + 10, what="further questions")
        assert len(held.unread) < 600_000 < sent
        held.cut()
        wait_until(lambda: app.is_gone, what="the end of the application")


@pytest.mark.parametrize("further", [b"", get()])
def test_a_request_that_waits_learns_that_its_client_has_disconnected(further: bytes) -> None:
    app = Asking()
    with served(app) as server:
        with server.connect() as connection:
            connection.sendall(get() + further)
            wait_until(lambda: app.asked > 0, what="the first question")
            assert not app.is_gone
        wait_until(lambda: app.is_gone, what="the end of the client")


@pytest.mark.long
def test_a_body_that_nobody_reads_waits_in_bounded_memory() -> None:
    app = Gated()
    with served(app) as server, server.connect() as connection:
        connection.settimeout(0.5)
        connection.sendall(post(b"Content-Length: 1000000000", body=b""))
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 200_000_000:
                sent += connection.send(bytes(100_000))
        assert len(server.only_connection().cycle.body) < 600_000
        app.gate.set()


def test_each_phase_of_a_connection_is_that_of_its_present_request() -> None:
    app = Gated()
    with served(app) as server, server.connect() as connection:
        held = server.only_connection()

        def becomes(phase: Phase) -> Any:
            wait_until(lambda: held.phase()[0] is phase, what=phase.value)
            return held.phase()[1]

        assert becomes(Phase.HEAD) is None
        connection.sendall(post(b"Content-Length: 8", body=b"half"))
        first = becomes(Phase.BODY)
        assert first is not None
        connection.sendall(b"rest")
        assert becomes(Phase.ANSWERING) is first
        app.gate.set()
        assert becomes(Phase.IDLE) is first
        connection.sendall(b"GET")
        assert becomes(Phase.HEAD) is first
        connection.sendall(get()[3:])
        assert becomes(Phase.IDLE) is not first


class Noting:
    """An application that reads a body, and says of each part that it has come."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async for _ in Request(scope, receive).stream():
            scope[BODY_PROGRESS]()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.requirement("DL-25")
def test_each_part_of_a_large_body_that_its_reader_notes_begins_the_time_of_the_body_anew() -> None:
    with served(Noting()) as server, server.connect() as connection:
        held = server.only_connection()
        seen: list[Any] = []
        connection.sendall(post(b"Content-Length: 12", body=b""))
        for part in (b"abcd", b"efgh"):
            connection.sendall(part)
            wait_until(lambda: held.phase()[0] is Phase.BODY and held.phase() not in seen, what="another time")
            seen.append(held.phase())
        connection.sendall(b"ijkl")
        wait_until(lambda: held.phase()[0] is Phase.IDLE, what="the answer")


@pytest.mark.long
def test_a_body_that_goes_on_after_its_answer_has_the_time_of_a_body() -> None:
    app = Gated()
    app.gate.set()
    bounds = GatewaySettings(body_timeout_s=1.0)
    with served(app, bounds) as server, server.connect() as connection:
        connection.sendall(post(b"Content-Length: 100000", body=b""))
        assert b" 200 " in connection.recv(4096)
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 15:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began > 1


@pytest.mark.long
def test_a_connection_whose_body_ended_after_the_answer_is_closed_when_idle() -> None:
    app = Gated()
    app.gate.set()
    with served(app, idle_timeout_s=1) as server, server.connect() as connection:
        connection.sendall(post(b"Content-Length: 8", body=b""))
        assert b" 200 " in connection.recv(4096)
        connection.sendall(b"the rest")
        assert rest(connection) == b""


@pytest.mark.long
def test_a_further_head_that_does_not_end_has_the_time_of_a_head() -> None:
    app = Gated()
    app.gate.set()
    with served(app, GatewaySettings(head_timeout_s=1.0)) as server, server.connect() as connection:
        connection.sendall(get() + get()[:-2])
        assert statuses(rest(connection)) == [200]


@pytest.mark.long
def test_a_malformed_body_after_the_answer_began_gets_no_second_answer() -> None:
    app = Gated()
    app.gate.set()
    with served(app) as server, server.connect() as connection:
        connection.sendall(CHUNKED.replace(b"/first", b"/slow"))
        found = connection.recv(4096)
        connection.sendall(b"xyz\r\n")
        found += rest(connection)
        assert statuses(found) == [200]
        assert not found.endswith(b"ok")
