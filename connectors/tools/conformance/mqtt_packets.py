"""As much of MQTT 3.1.1 and 5 as the proxy needs: packets in a stream of bytes, and the packet PUBLISH."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

CONNECT, PUBLISH, PUBACK = 1, 3, 4
VERSION_5: Final = 5
_LARGEST: Final = 4


class Packet(NamedTuple):
    """One packet: its type, the bytes of all of it, and the offset of its variable header."""

    kind: int
    whole: bytes
    start: int


class Publish(NamedTuple):
    """The fields of a PUBLISH. `packet_id` is 0 with QoS 0."""

    topic: str
    packet_id: int
    payload: bytes
    is_retained: bool


class PacketReader:
    """Splits a stream of bytes into packets."""

    def __init__(self) -> None:
        self._unread = b""

    def feed(self, data: bytes) -> Iterator[Packet]:
        """Take bytes of the stream, and yield each packet that is complete now.

        Raises ValueError if the bytes are no MQTT.
        """
        self._unread += data
        while (found := self._first()) is not None:
            self._unread = self._unread[len(found.whole) :]
            yield found

    def _first(self) -> Packet | None:
        number = _number(self._unread, 1)
        if number is None:
            return None
        size, start = number
        if len(self._unread) < start + size:
            return None
        return Packet(self._unread[0] >> 4, self._unread[: start + size], start)


def version_of(connect: Packet) -> int:
    """Return the protocol level of a CONNECT: 4 for MQTT 3.1.1, 5 for MQTT 5."""
    name_bytes = int.from_bytes(connect.whole[connect.start : connect.start + 2], "big")
    return connect.whole[connect.start + 2 + name_bytes]


def read_publish(packet: Packet, version: int) -> Publish:
    """Return the fields of a PUBLISH of a connection with this protocol level."""
    whole, at = packet.whole, packet.start
    topic_bytes = int.from_bytes(whole[at : at + 2], "big")
    topic = whole[at + 2 : at + 2 + topic_bytes].decode("utf-8")
    at += 2 + topic_bytes
    packet_id = 0
    if whole[0] & 6:
        packet_id = int.from_bytes(whole[at : at + 2], "big")
        at += 2
    if version == VERSION_5:
        size, at = _number(whole, at) or (0, at)
        at += size
    return Publish(topic, packet_id, whole[at:], bool(whole[0] & 1))


def publish_packet(topic: str, payload: bytes, version: int) -> bytes:
    """Return the bytes of a PUBLISH with QoS 0."""
    name = topic.encode("utf-8")
    body = len(name).to_bytes(2, "big") + name + (b"\0" if version == VERSION_5 else b"") + payload
    return bytes([PUBLISH << 4]) + _length(len(body)) + body


def puback_packet(packet_id: int) -> bytes:
    """Return the bytes of a PUBACK that says success."""
    return bytes([PUBACK << 4, 2]) + packet_id.to_bytes(2, "big")


def _number(data: bytes, at: int) -> tuple[int, int] | None:
    """Return a variable byte integer at an offset, and the offset after it. None: it is not complete."""
    value = 0
    for place in range(_LARGEST):
        if at + place >= len(data):
            return None
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a length of more than four bytes")


def _length(size: int) -> bytes:
    found = bytearray()
    while True:
        size, byte = divmod(size, 0x80)
        found.append(byte | (0x80 if size else 0))
        if not size:
            return bytes(found)
