"""Fault injection for `./trunkline prove`: the proxy, and the points where a process kills itself."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from paho.mqtt.client import Client, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.publish import single

from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import LOOPBACK, make_mosquitto
from tests.faults.prove.brokers import forget_sessions
from tests.faults.prove.crash_points import FOLDER_VARIABLE, arm, disarm, fired
from tests.programs import run_program
from tests.tcp_proxy import CUT, LOSE, MUTE, PASS, SLOW, TcpProxy

HITS = """
import sys
from tests.faults.prove.crash_points import Points
points = Points("part")
for number in range(5):
    points.hit("here")
    print(number, flush=True)
"""


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    """A proxy in front of somebody who says what he is told."""
    listener = socket.create_server((LOOPBACK, 0))

    def echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    found = TcpProxy(socket.create_server((LOOPBACK, 0)), listener.getsockname()[1], delay_s=0.1)
    yield found
    found.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connected(proxy: TcpProxy, timeout_s: float = 5.0) -> socket.socket:
    """A connection through it."""
    return socket.create_connection((LOOPBACK, proxy.port), timeout=timeout_s)


def said(connection: socket.socket) -> bytes:
    """Send some bytes and return the answer."""
    connection.sendall(b"hello")
    return connection.recv(100)


def test_a_proxy_passes_on_and_a_slow_one_later(proxy: TcpProxy) -> None:
    with connected(proxy) as connection:
        assert said(connection) == b"hello"
        proxy.mode = SLOW
        began = time.monotonic()
        assert said(connection) == b"hello"
        assert time.monotonic() - began >= 0.2


def test_a_mute_one_keeps_connections_and_lets_through_later_what_came(proxy: TcpProxy) -> None:
    with connected(proxy) as connection:
        proxy.mode = MUTE
        connection.sendall(b"hello")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        connection.settimeout(5)
        proxy.mode = PASS
        assert connection.recv(100) == b"hello"


def test_a_lost_answer_ends_its_connection_and_the_next_one_passes(proxy: TcpProxy) -> None:
    with connected(proxy) as connection:
        proxy.mode = LOSE
        assert said(connection) == b""
    assert proxy.mode == PASS
    with connected(proxy) as connection:
        assert said(connection) == b"hello"


def test_a_cut_ends_what_is_open_and_what_comes_until_it_is_over(proxy: TcpProxy) -> None:
    def is_cut(connection: socket.socket) -> bool:
        try:
            return said(connection) == b""
        except OSError:
            return True

    with connected(proxy) as connection:
        assert said(connection) == b"hello"
        proxy.mode = CUT
        assert is_cut(connection)
    with connected(proxy) as connection:
        assert is_cut(connection)
    proxy.mode = PASS
    with connected(proxy) as connection:
        assert said(connection) == b"hello"


def hits(folder: Path) -> subprocess.CompletedProcess[str]:
    """A process that comes to its point five times."""
    return run_program(
        [sys.executable, "-c", HITS],
        timeout_s=30,
        env={FOLDER_VARIABLE: str(folder), "PYTHONPATH": str(PROJECT_ROOT)},
    )


def test_a_process_dies_at_its_armed_point_once(tmp_path: Path) -> None:
    assert hits(tmp_path).returncode == 0
    arm(tmp_path, "part.here", 3)
    assert not fired(tmp_path, "part.here")
    died = hits(tmp_path)
    assert (died.returncode, died.stdout.split()) == (-signal.SIGKILL, ["0", "1"])
    assert fired(tmp_path, "part.here")
    assert hits(tmp_path).returncode == 0


def test_a_point_that_is_not_armed_any_more_kills_nobody(tmp_path: Path) -> None:
    arm(tmp_path, "part.here")
    disarm(tmp_path)
    assert hits(tmp_path).returncode == 0
    assert not fired(tmp_path, "part.here")


def session(port: int, publish: bytes | None = None) -> list[bytes]:
    """Be the client `mina` with a persistent session, and return what comes within half a second.

    `publish` is published on its topic when it has left.
    """
    got: list[bytes] = []
    client = Client(CallbackAPIVersion.VERSION2, "mina", clean_session=False, protocol=MQTTv311)
    client.on_message = lambda client, userdata, message: got.append(message.payload)
    client.connect(LOOPBACK, port)
    client.subscribe("inbox", qos=1)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        client.loop(0.05)
    client.disconnect()
    if publish is not None:
        single("inbox", publish, qos=1, hostname=LOOPBACK, port=port)
    return got


@pytest.mark.mosquitto
def test_a_mosquitto_that_is_killed_brings_back_nothing_of_a_seed_that_is_over(tmp_path: Path) -> None:
    mosquitto = make_mosquitto(tmp_path)
    mosquitto.start()
    try:
        session(mosquitto.port, b"of the first seed")
        mosquitto.stop()  # it saves its sessions
        mosquitto.start()
        assert session(mosquitto.port, b"of the second seed") == [b"of the first seed"]
        mosquitto.stop()
        mosquitto.start()
        forget_sessions(mosquitto, tmp_path)
        assert session(mosquitto.port) == []
    finally:
        mosquitto.kill()
