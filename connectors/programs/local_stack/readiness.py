"""Checks whether Kafka, an MQTT broker or an HTTP server answers, by one request without a client library."""

from __future__ import annotations

import http.client
import socket
import ssl
import struct

# Kafka: ApiVersions, version 0, correlation id 7, no client id. The answer repeats the correlation id.
_API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 7, -1)
# MQTT 3.1.1: CONNECT, clean session, keep-alive 5 s, no client id. Any CONNACK comes from a broker.
_CONNECT = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x05\x00\x00"
_CONNACK, _DISCONNECT = 0x20, b"\xe0\x00"


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
    connection: http.client.HTTPConnection
    if is_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
