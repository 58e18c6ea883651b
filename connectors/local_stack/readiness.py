"""Probes of brokers and gateway: one request in each one's own protocol, without a client library."""

from __future__ import annotations

import http.client
import socket
import ssl
import struct

# Kafka: ApiVersions, version 0, correlation id 7, no client id. The answer repeats the correlation id.
_API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 7, -1)
# MQTT 3.1.1: CONNECT, clean session, keep-alive 5 s, no client id. Whatever the answer, a broker wrote it.
_CONNECT = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x05\x00\x00"
_CONNACK, _DISCONNECT = 0x20, b"\xe0\x00"


def kafka_answers(host: str, port: int, timeout_s: float = 1.0, context: ssl.SSLContext | None = None) -> bool:
    """Whether a Kafka broker handles requests here; with `context` under TLS. An open port alone does not mean
    that yet. Before a login Kafka answers this one request.
    """
    try:
        with (
            _connected(host, port, timeout_s, context) as connection,
            connection.makefile("rb") as received,
        ):
            connection.sendall(_API_VERSIONS)
            return received.read(8)[4:] == struct.pack(">i", 7)
    except OSError:
        return False


def mqtt_answers(host: str, port: int, timeout_s: float = 1.0, context: ssl.SSLContext | None = None) -> bool:
    """Whether an MQTT broker lets us in or refuses us politely here; with `context` under TLS."""
    try:
        with (
            _connected(host, port, timeout_s, context) as connection,
            connection.makefile("rb") as received,
        ):
            connection.sendall(_CONNECT)
            answer = received.read(4)
            if answer[:1] != bytes([_CONNACK]):
                return False
            connection.sendall(_DISCONNECT)
            return True
    except OSError:
        return False


def http_answers(host: str, port: int, path: str, timeout_s: float = 2.0, *, is_tls: bool = False) -> bool:
    """Whether an HTTP server gives any answer to a GET here. Its certificate is not verified: the question is
    not who answers.
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


def _connected(host: str, port: int, timeout_s: float, context: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection((host, port), timeout=timeout_s)
    try:
        return plain if context is None else context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
