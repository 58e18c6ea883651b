"""A small MQTT 5 broker that sends its clients packets which no broker should send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from connectors.tools.conformance.mqtt_proxy import CONNECT, PUBACK, PUBLISH, Packet, PacketReader
from tests.broker_processes import LOOPBACK

_SUBSCRIBE, _UNSUBSCRIBE, _PINGREQ, _DISCONNECT = 8, 10, 12, 14


def packet(first: int, body: bytes) -> bytes:
    """Return a packet with a right length, whatever its body is."""
    length, digits = len(body), bytearray()
    while True:
        length, digit = divmod(length, 128)
        digits.append(digit | (0x80 if length else 0))
        if not length:
            return bytes([first]) + bytes(digits) + body


def text(content: bytes) -> bytes:
    """Return a length of two bytes and the content, as MQTT writes a text."""
    return len(content).to_bytes(2, "big") + content


def publish(topic: bytes, payload: bytes, mid: int, *, properties: bytes = b"\x00", first: int = 0x32) -> bytes:
    """Return a PUBLISH with QoS 1. `properties` begin with their length."""
    return packet(first, text(topic) + mid.to_bytes(2, "big") + properties + payload)


class HostileBroker:
    """It accepts any login and subscription. `script` has the packets for a client that has subscribed.

    They are sent again on each connection, except those whose packet ids were acknowledged, as a broker does
    with the messages of a session. Presence and receipts are acknowledged and go nowhere. `answer` makes the
    bytes that follow the acknowledgement of a message, from its topic and payload.
    """

    def __init__(
        self,
        script: list[bytes],
        is_reader: Callable[[bytes], bool] = lambda subscribe: True,
        answer: Callable[[bytes, bytes], bytes] = lambda topic, payload: b"",
    ) -> None:
        self.script, self._is_reader, self._answer = script, is_reader, answer
        self.acknowledged: list[int] = []
        self.connects = 0
        self._ends: list[socket.socket] = []
        self._server = socket.create_server((LOOPBACK, 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop, and close all connections."""
        for end in (self._server, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self._ends.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        reader = PacketReader()
        with suppress(OSError):
            while data := client.recv(64 * 1024):
                for found in reader.feed(data):
                    self._take(client, found)

    def _take(self, client: socket.socket, found: Packet) -> None:
        kind, body = found.kind, found.whole[found.start :]
        if kind == CONNECT:
            client.sendall(b"\x20\x03\x00\x00\x00")
        elif kind == _SUBSCRIBE:
            self._subscribed(client, body)
        elif kind == _UNSUBSCRIBE:
            client.sendall(packet(0xB0, body[:2] + b"\x00\x00"))
        elif kind == _DISCONNECT:
            client.close()
        elif kind == _PINGREQ:
            client.sendall(b"\xd0\x00")
        elif kind == PUBACK:
            self.acknowledged.append(int.from_bytes(body[:2], "big"))
        elif kind == PUBLISH and found.whole[0] & 6:
            at = 2 + int.from_bytes(body[:2], "big")
            payload = body[at + 3 + body[at + 2] :]
            client.sendall(packet(0x40, body[at : at + 2]) + self._answer(body[2:at], payload))

    def _subscribed(self, client: socket.socket, body: bytes) -> None:
        filters = _count_filters(body)
        client.sendall(packet(0x90, body[:2] + b"\x00" + b"\x01" * filters))
        if self._is_reader(body):
            self.connects += 1
            for one in self.script:
                mid = _mid_of(one)
                if mid == 0 or mid not in self.acknowledged:
                    client.sendall(one)


def _length_bytes(found: bytes) -> int:
    return next(count for count in range(1, 5) if not found[count] & 0x80)


def _count_filters(body: bytes) -> int:
    at, count = 3 + body[2], 0
    while at < len(body):
        at, count = at + 2 + int.from_bytes(body[at : at + 2], "big") + 1, count + 1
    return count


def _mid_of(found: bytes) -> int:
    """Return the packet id of a PUBLISH with QoS 1 or 2, 0 if it has none."""
    body = found[1 + _length_bytes(found) :]
    at = 2 + int.from_bytes(body[:2], "big")
    return int.from_bytes(body[at : at + 2], "big") if found[0] >> 4 == PUBLISH and found[0] & 6 else 0
