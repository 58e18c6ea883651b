"""TCP ports on loopback: finds free ones, names the program that uses a wanted one, and whether one answers.

Kafka, an MQTT broker or an HTTP server is asked by one request without a client library.
"""

from __future__ import annotations

import random
import socket
import ssl
import struct
from pathlib import Path

import psutil

from trunkline_agent.errors import TrunklineError

LOOPBACK = "127.0.0.1"
# Below the kernel's range for outgoing connections, so that none of these takes the port.
_FIRST, _LAST = 20_000, 32_000
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Open sockets by port. Their names tell other processes that the port is taken, and vanish with this process.
_taken: dict[int, int] = {}


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on this TCP port of 127.0.0.1 now. The port is not reserved."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port is free although connections of its last owner are still closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a free TCP port of loopback that neither this process nor another running one got before.

    The port stays reserved until this process ends. A server may take seconds until it listens, and meanwhile
    other processes look for ports, too.

    Raises:
        TrunklineError: No port is free.
    """
    choice = random.SystemRandom()
    for _ in range(1000):
        port = choice.randrange(_FIRST, _LAST)
        if port_is_free(port) and _take(port):
            return port
    raise TrunklineError(f"no free port between {_FIRST} and {_LAST}: end some programs and try again")


def _take(port: int) -> bool:
    if port in _taken:
        return False
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # In Linux's abstract namespace (unix(7)): no file, and gone with the process.
        name.bind(f"\0trunkline/port/{port}")
    except OSError:
        name.close()
        return False
    _taken[port] = name.detach()  # a socket object would warn at the end of the process that it is not closed
    return True


def port_owner(port: int) -> str:
    """Return a text that names the program that listens on a port, as far as this user may see it.

    It is `pid 123 (java)`, or `another program`. For a port in the kernel's range for outgoing connections the
    text says that it may be such a connection.
    """
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid:
                    return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
                break
    except psutil.Error:
        pass
    return "another program" + _outgoing_hint(port)


def _outgoing_hint(port: int) -> str:
    try:
        first, last = map(int, _OUTGOING.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return ""
    if not first <= port <= last:
        return ""
    return f", or by an outgoing connection: those get ports from {first} to {last} ({_OUTGOING})"


def require_free(port: int, setting: str) -> None:
    """Raise TrunklineError if a port of loopback is taken. The message names the setting and the owner.

    Args:
        port: The port.
        setting: The setting with the port, such as `mqtt.port`.
    """
    if not port_is_free(port):
        variable = "TRUNKLINE__" + setting.upper().replace(".", "__")
        raise TrunklineError(
            f"port {port} (setting {setting}) is taken by {port_owner(port)}: end that, or set {variable} "
            "to another"
        )


# Kafka: ApiVersions, version 0, correlation id 7, no client id. The answer repeats the correlation id.
_API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 7, -1)
# MQTT 3.1.1: CONNECT, clean session, keep-alive 5 s, no client id. Any CONNACK comes from a broker.
_CONNECT = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x05\x00\x00"
_CONNACK, _DISCONNECT = 0x20, b"\xe0\x00"
# The beginning of any answer over HTTP.
_STATUS_LINE = b"HTTP/"


def kafka_answers(host: str, port: int, timeout_s: float = 1.0, context: ssl.SSLContext | None = None) -> bool:
    """Return whether a Kafka broker at this address answers a request (ApiVersions) in time.

    Kafka answers this request before a login. False also if the port is open but nothing answers.

    Args:
        host: The host name or address.
        port: The TCP port.
        timeout_s: How long to wait for the connection and for each answer, in seconds.
        context: Connect over TLS with this context. None: without TLS.
    """
    return _answer(host, port, timeout_s, context, _API_VERSIONS, 8)[4:] == struct.pack(">i", 7)


def mqtt_answers(host: str, port: int, timeout_s: float = 1.0, context: ssl.SSLContext | None = None) -> bool:
    """Return whether an MQTT broker at this address answers a CONNECT packet in time.

    A refused login counts as an answer.

    Args:
        host: The host name or address.
        port: The TCP port.
        timeout_s: How long to wait for the connection and for each answer, in seconds.
        context: Connect over TLS with this context. None: without TLS.
    """
    answer = _answer(host, port, timeout_s, context, _CONNECT, 4, farewell=_DISCONNECT)
    return answer[:1] == bytes([_CONNACK])


def _answer(
    host: str,
    port: int,
    timeout_s: float,
    context: ssl.SSLContext | None,
    request: bytes,
    size: int,
    farewell: bytes = b"",
) -> bytes:
    """Return the first `size` bytes of the answer to a request, and none if it was not answered in time."""
    try:
        with (
            socket.create_connection((host, port), timeout=timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host) if context else plain as connection,
            connection.makefile("rb") as received,
        ):
            connection.sendall(request)
            answer = received.read(size)
            connection.sendall(farewell)
            return answer
    except OSError:
        return b""


def http_answers(host: str, port: int, path: str, timeout_s: float = 2.0, *, is_tls: bool = False) -> bool:
    """Return whether an HTTP server answers a GET of `path` at this address, with any status.

    False means that there was no connection, or no answer within `timeout_s` seconds. With `is_tls`, the
    connection uses TLS. The certificate is not verified, because the identity of the server does not matter.
    """
    context = None
    if is_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    return _answer(host, port, timeout_s, context, request, len(_STATUS_LINE)) == _STATUS_LINE
