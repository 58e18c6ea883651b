"""A proxy in front of the MQTT broker that cuts connections, holds or swallows packets, and forges receipts.

It reads as much of MQTT 3.1.1 and 5 as it needs: packets in a stream of bytes, and the packet PUBLISH.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

CONNECT, PUBLISH, PUBACK = 1, 3, 4
_VERSION_5: Final = 5
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


def _read_publish(packet: Packet, version: int) -> Publish:
    """Return the fields of a PUBLISH of a connection with this protocol level."""
    whole, at = packet.whole, packet.start
    topic_bytes = int.from_bytes(whole[at : at + 2], "big")
    topic = whole[at + 2 : at + 2 + topic_bytes].decode("utf-8")
    at += 2 + topic_bytes
    packet_id = 0
    if whole[0] & 6:
        packet_id = int.from_bytes(whole[at : at + 2], "big")
        at += 2
    if version == _VERSION_5:
        size, at = _number(whole, at) or (0, at)
        at += size
    return Publish(topic, packet_id, whole[at:], bool(whole[0] & 1))


def _publish_packet(topic: str, payload: bytes, version: int) -> bytes:
    """Return the bytes of a PUBLISH with QoS 0."""
    name = topic.encode("utf-8")
    body = len(name).to_bytes(2, "big") + name + (b"\0" if version == _VERSION_5 else b"") + payload
    return bytes([PUBLISH << 4]) + _length(len(body)) + body


def _puback_packet(packet_id: int) -> bytes:
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


# The directions of packets: of a client, and of the broker.
UP, DOWN = "up", "down"
_LOOPBACK: Final = "127.0.0.1"
_CHUNK: Final = 64 * 1024
_HOLD_S: Final = 60.0
_CONNECT_S: Final = 10.0
_FORGERY_S: Final = 0.4


@dataclass
class MqttFault:
    """A fault that the next PUBLISH of a client meets.

    Attributes:
        forward: Whether the broker gets the packet.
        forged: Returns payloads that the client gets at its receipts topic before the packet is forwarded.
        acknowledge: Whether the proxy sends the client a PUBACK for a packet that it does not forward.
        mute: Whether the client gets no receipts from then on.
        cut: Whether the connection is closed after that, with `forward` at the first receipt.
        hold: Whether the connection stands still until `release`, with `forward` at the first receipt.
        hit: Set when the packet came; with `forward`, when its receipt came.
    """

    forward: bool = False
    forged: Callable[[Publish], list[bytes]] | None = None
    acknowledge: bool = False
    mute: bool = False
    cut: bool = False
    hold: bool = False
    hit: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let a held connection go on."""
        self._released.set()

    def wait_released(self) -> None:
        """Wait for `release`, a minute at most."""
        self._released.wait(_HOLD_S)


class MqttProxy:
    """A proxy on a free port of loopback, without TLS. `close` stops it.

    A fault is for one PUBLISH of a client. `hold` and `cut` are for all connections.

    Args:
        host: The broker's host.
        port: The broker's port.
        context: The TLS context for the broker. None: without TLS.
    """

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self._broker = host, port
        self._context = context
        self._lock = threading.Lock()
        self._faults: list[MqttFault] = []
        self._planted: list[MqttFault] = []
        self._published: list[Publish] = []
        self._links: list[_Link] = []
        self._held: set[tuple[str, int]] = set()
        self._let_go = threading.Condition()
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._thread = threading.Thread(target=self._accept, name="mqtt-proxy", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port for clients."""
        return int(self._listener.getsockname()[1])

    def plant(self, fault: MqttFault) -> MqttFault:
        """Let the next PUBLISH of a client meet `fault`, which is returned. Earlier faults come first."""
        with self._lock:
            self._faults.append(fault)
            self._planted.append(fault)
        return fault

    @property
    def published(self) -> list[Publish]:
        """The packets that clients have published until now, also those that were not forwarded."""
        with self._lock:
            return list(self._published)

    def heal(self) -> None:
        """Remove the faults that no PUBLISH has met."""
        with self._lock:
            self._faults.clear()

    def hold(self, direction: str, kind: int) -> None:
        """Hold all packets of this type, and those behind them, until `release`: a minute at most for each."""
        with self._let_go:
            self._held.add((direction, kind))

    def release(self) -> None:
        """Pass held packets on, and hold no more."""
        with self._let_go:
            self._held.clear()
            self._let_go.notify_all()

    def wait_passable(self, direction: str, kind: int) -> None:
        """Wait while packets of this type are held."""
        with self._let_go:
            self._let_go.wait_for(lambda: (direction, kind) not in self._held, _HOLD_S)

    def count(self, direction: str, kind: int, link: int | None = None) -> int:
        """Return how many packets of this type have come, also held ones, by all connections or that number."""
        with self._lock:
            links = self._links if link is None else self._links[link : link + 1]
            return sum(one.seen.count((direction, kind)) for one in links)

    def cut(self) -> None:
        """End all connections that are open."""
        with self._lock:
            links = list(self._links)
        for one in links:
            one.end()

    def close(self) -> None:
        """Stop the proxy and close its connections."""
        self.heal()
        with self._lock:
            for fault in self._planted:
                fault.release()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.release()
        self._thread.join()

    def noted(self, publish: Publish) -> MqttFault | None:
        """Record a PUBLISH of a client. Return the fault that it meets, or None."""
        with self._lock:
            self._published.append(publish)
            return self._faults.pop(0) if self._faults else None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="mqtt-link", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            broker = socket.create_connection(self._broker, _CONNECT_S)
            broker.settimeout(None)
            if self._context is not None:
                broker = self._context.wrap_socket(broker, server_hostname=self._broker[0])
        except OSError:
            client.close()
            return
        link = _Link(self, client, broker)
        with self._lock:
            self._links.append(link)
        back = threading.Thread(target=link.pass_back, name="mqtt-back", daemon=True)
        back.start()
        link.pass_on()
        back.join()
        client.close()
        broker.close()


class _Link:
    """One connection through the proxy."""

    def __init__(self, proxy: MqttProxy, client: socket.socket, broker: socket.socket) -> None:
        self._proxy, self._client, self._broker = proxy, client, broker
        self._version = 4
        self._writing = threading.Lock()
        # The fault that a PUBLISH has met, which waits for the receipt.
        self._met: MqttFault | None = None
        self._is_muted = False
        # The direction and the type of each packet, as they came.
        self.seen: list[tuple[str, int]] = []

    def end(self) -> None:
        """End the connection."""
        for one in (self._client, self._broker):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def pass_on(self) -> None:
        """Pass the client's packets on to the broker, until the connection ends."""
        self._pump(UP, self._client, self._from_client)

    def pass_back(self) -> None:
        """Pass the broker's packets back to the client, until the connection ends."""
        self._pump(DOWN, self._broker, self._from_broker)

    def _pump(self, direction: str, source: socket.socket, take: Callable[[Packet], None]) -> None:
        reader = PacketReader()
        with suppress(OSError, ValueError):
            while data := source.recv(_CHUNK):
                for packet in reader.feed(data):
                    self.seen.append((direction, packet.kind))
                    self._proxy.wait_passable(direction, packet.kind)
                    take(packet)
        self.end()

    def _from_client(self, packet: Packet) -> None:
        if packet.kind == CONNECT:
            self._version = version_of(packet)
        if packet.kind != PUBLISH:
            self._broker.sendall(packet.whole)
            return
        publish = _read_publish(packet, self._version)
        fault = self._proxy.noted(publish)
        if fault is None:
            self._broker.sendall(packet.whole)
            return
        self._is_muted |= fault.mute
        if fault.forged is not None:
            receipts = publish.topic.rpartition("/")[0] + "/receipts"
            for payload in fault.forged(publish):
                self._to_client(_publish_packet(receipts, payload, self._version))
            # Enough time for a client to believe it.
            threading.Event().wait(_FORGERY_S)
        if fault.forward:
            self._met = fault
            self._broker.sendall(packet.whole)
            return
        if fault.acknowledge:
            self._to_client(_puback_packet(publish.packet_id))
        self._end_of(fault)

    def _from_broker(self, packet: Packet) -> None:
        if packet.kind == PUBLISH:
            fault, self._met = self._met, None
            if fault is not None:
                if fault.cut or fault.hold:
                    self._end_of(fault)
                    return
                fault.hit.set()
            if self._is_muted:
                return
        self._to_client(packet.whole)

    def _end_of(self, fault: MqttFault) -> None:
        fault.hit.set()
        if fault.hold:
            fault.wait_released()
        if fault.cut or fault.hold:
            raise OSError("cut")

    def _to_client(self, data: bytes) -> None:
        with self._writing:
            self._client.sendall(data)
