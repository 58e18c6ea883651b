"""A client whose link has gone without a word: it is probed before a message is handed out for good (DL-52)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from connectors.plumbing.network.sockets import UNANSWERED_MS, peer_answers, probe_silent_peers, silent_ms
from connectors.programs.gateway_program.application import Door
from connectors.programs.gateway_program.http_server import bound_socket
from tests.broker_processes import wait_until
from tests.network_namespaces import HUB, cabled_namespaces, listener_in, may_make_namespaces, socket_in, unplug


@pytest.fixture
def apart() -> Iterator[tuple[socket.socket, str | None]]:
    """A connection that a listener has accepted, and the namespace of its client; None without root."""
    with ExitStack() as opened:
        hub, agent = opened.enter_context(cabled_namespaces()) if may_make_namespaces() else (None, None)
        listener = socket.create_server(("127.0.0.1", 0)) if hub is None else listener_in(hub, HUB)
        opened.enter_context(listener)
        probe_silent_peers(listener)
        address = listener.getsockname()

        def connected() -> socket.socket:
            return socket.create_connection(address, 10)

        client = opened.enter_context(connected() if agent is None else socket_in(agent, connected))
        accepted = opened.enter_context(listener.accept()[0])
        client.sendall(b"GET")
        assert accepted.recv(3) == b"GET"
        yield accepted, agent


def asked(connection: socket.socket) -> tuple[bool, float]:
    """True if the peer answers, and the seconds after which that is known."""
    begun = time.monotonic()
    return asyncio.run(peer_answers(connection)), time.monotonic() - begun


def wait_for_silence(connection: socket.socket) -> None:
    """Wait until nothing came for longer than a second, as from a client that waits for a message."""
    wait_until(lambda: silent_ms(connection) > 1100, what="the silence")


@pytest.mark.long
@pytest.mark.requirement("DL-52")
def test_a_client_without_a_link_does_not_answer_and_one_with_a_link_does_at_once(
    apart: tuple[socket.socket, str | None],
) -> None:
    connection, client = apart
    assert asked(connection)[0]
    wait_for_silence(connection)
    is_there, passed_s = asked(connection)
    assert is_there and passed_s < 1.0
    if client is None:  # without root, there is no link to take away
        return
    unplug(client)
    wait_for_silence(connection)
    is_there, passed_s = asked(connection)
    assert not is_there and passed_s < 3.0
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15


@pytest.mark.requirement("DL-52")
def test_connections_of_a_gateway_are_probed_and_end_within_a_minute_without_an_answer() -> None:
    with bound_socket(Door("hub", None, "127.0.0.1", 0, "gateway.port")) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNANSWERED_MS < 60_000
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
            # On one machine, the kernel always tells the end of a client.
            assert asked(accepted)[0]


@pytest.mark.requirement("DL-52")
def test_a_client_that_left_is_gone_before_its_request_was_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        with listener.accept()[0] as accepted:
            client.sendall(b"GET")
            assert asked(accepted)[0]
            client.close()
            assert not asked(accepted)[0]
            assert accepted.recv(3) == b"GET"
        assert not asked(accepted)[0]
