"""The parts below a pump: the watchdog of its event loop, and a small HTTP client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from connectors.doors.xml_pump.dispatcher import limit_in, task_name
from connectors.doors.xml_pump.gateway_link import HttpAnswer, HttpConnections
from connectors.doors.xml_pump.pump_program import EXIT_BLOCKED, LoopWatchdog
from connectors.plumbing.xml_payloads.deliveries import leased_from
from tests.broker_processes import LOOPBACK, free_port
from tests.connectors.agent_sdk.small_proxy import dropping, resolving
from trunkline_agent.errors import BackboneUnreachable, UsageError

NAME = "handler/slow.one/800"
DEAD = "127.0.0.2"


def watched(work: Callable[[], None]) -> list[int]:
    """The exit codes with which the process would have ended while a handler's task does this."""
    ends: list[int] = []
    over = threading.Event()

    def end(code: int) -> None:
        ends.append(code)
        over.set()

    async def run() -> None:
        watchdog = LoopWatchdog(
            lambda task: limit_in("" if task is None else task.get_name()) or (9.0, ""), end, 0.2
        )
        watchdog.start()

        async def handler() -> None:
            work()

        try:
            await asyncio.create_task(handler(), name=NAME)
        finally:
            watchdog.stop()

    asyncio.run(run())
    return ends


@pytest.mark.long
@pytest.mark.requirement("XP-13")
def test_a_loop_that_is_blocked_beyond_the_handlers_limit_ends_the_process_and_one_within_it_does_not():
    assert watched(lambda: time.sleep(0.6)) == []
    assert watched(lambda: time.sleep(2.5)) == [EXIT_BLOCKED]


def test_the_name_of_a_task_says_whose_handler_runs_and_how_long_it_may():
    ids = {"listener": "a.b-c", "message_id": "m", "request_id": "r", "sender": "s", "kind": "k", "body": ""}
    assert limit_in(task_name(leased_from({**ids, "timeout_ms": 1500}))) == (1.5, "a.b-c")
    assert limit_in("Task-7") is None


async def server(answers: list[bytes]) -> tuple[asyncio.Server, int, list[int]]:
    """A server that gives these answers, each ended by closing when it says so; and the port of each client."""
    port, clients = free_port(), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(x[16:]) for x in head.split(b"\r\n") if x.startswith(b"Content-Length: ")), 0
                )
                await reader.readexactly(length)
                clients.append(writer.get_extra_info("peername")[1])
                answer = answers.pop(0)
                writer.write(answer)
                await writer.drain()
                if b"close" in answer or b"Content-Length" not in answer:
                    return
        except (OSError, EOFError):
            return
        finally:
            writer.close()

    return await asyncio.start_server(serve, LOOPBACK, port), port, clients


GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def asked(
    answers: list[bytes],
    count: int,
    host: str = LOOPBACK,
    dead: Callable[[str, int], AbstractContextManager[None]] = lambda *_: nullcontext(),
) -> tuple[list[HttpAnswer | Exception], int]:
    """Return the results of this many requests, and the number of connections; `dead` blocks DEAD."""

    async def run() -> tuple[list[HttpAnswer | Exception], int]:
        served, port, clients = await server(answers)
        http = HttpConnections(f"http://{host}:{port}/prefix", "token")
        found: list[HttpAnswer | Exception] = []
        async with served:
            with dead(DEAD, port):
                for _ in range(count):
                    try:
                        found.append(await http.ask("POST", "/x", b"{}", 2.0, "id"))
                    except BackboneUnreachable as error:
                        found.append(error)
                http.close()
        return found, len(set(clients))

    return asyncio.run(run())


def test_a_connection_is_kept_for_the_next_request_unless_the_server_closes_it():
    assert asked([GOOD] * 3, 3) == ([HttpAnswer(200, b"{}")] * 3, 1)
    closing = b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    assert asked([closing, GOOD], 2) == ([HttpAnswer(503, b""), HttpAnswer(200, b"{}")], 2)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_whole_answer_is_an_unreachable_gateway_and_the_next_request_is_well(wrong: bytes):
    (first, second), _ = asked([wrong, GOOD], 2)
    assert isinstance(first, BackboneUnreachable)
    assert second == HttpAnswer(200, b"{}")


def test_an_address_that_is_none_is_refused():
    with pytest.raises(UsageError, match="expected http"):
        HttpConnections("ftp://somewhere", None)


@pytest.mark.requirement("XP-16")
@pytest.mark.parametrize("dead", [dropping, lambda *_: nullcontext()], ids=["drops packets", "refuses"])
def test_a_gateway_whose_first_address_is_dead_is_reached_at_the_second(
    dead: Callable[[str, int], AbstractContextManager[None]],
):
    with resolving("gateway.test", [DEAD, LOOPBACK]):
        assert asked([GOOD], 1, "gateway.test", dead) == ([HttpAnswer(200, b"{}")], 1)
