"""Plain MQTT for tests: publish and listen, and a proxy that sees and holds back single packets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from paho.mqtt.client import MQTTMessage
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from schemas.settings.settings import MqttSettings
from tests.broker_processes import LOOPBACK, wait_until
from trunkline_agent.mqtt.mqtt_client import connect_properties, cut_connection, dial, new_client

PUBLISH, PUBACK = 3, 4
UP, DOWN = "up", "down"


def publish_all(
    mqtt: MqttSettings,
    messages: Sequence[tuple[str, bytes]],
    *,
    retain: bool = False,
    user_properties: Sequence[tuple[str, str]] = (),
) -> None:
    """Publish in order, QoS 1, and return when the broker has acknowledged all. Topics are below the prefix."""
    client = new_client(mqtt)
    dial(client, mqtt, connect_properties())
    properties = Properties(PacketTypes.PUBLISH)
    if user_properties:
        properties.UserProperty = list(user_properties)
    try:
        wait_until(client.is_connected, 10, "CONNACK")
        sent = [
            client.publish(f"{mqtt.topic_prefix}/{topic}", payload, 1, retain, properties)
            for topic, payload in messages
        ]
        for info in sent:
            info.wait_for_publish(30)
            assert info.is_published()
        client.disconnect()
    finally:
        cut_connection(client)


@contextmanager
def listening(
    mqtt: MqttSettings, topic: str, answer: Callable[[Any, MQTTMessage], None] | None = None
) -> Iterator[list[MQTTMessage]]:
    """Messages of a topic filter below the prefix, as they come; `answer(client, message)` runs for each."""
    found: list[MQTTMessage] = []
    subscribed = threading.Event()
    client = new_client(mqtt)

    def on_message(client: Any, userdata: Any, message: MQTTMessage) -> None:
        found.append(message)
        if answer is not None:
            answer(client, message)

    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    client.on_connect = lambda *_: client.subscribe(f"{mqtt.topic_prefix}/{topic}", qos=1)
    dial(client, mqtt, connect_properties())
    try:
        assert subscribed.wait(10)
        yield found
    finally:
        cut_connection(client)


@dataclass
class _Link:
    """One connection through the proxy."""

    number: int
    ends: tuple[socket.socket, socket.socket]
    # Direction and packet type, in order: as they came in, and as they were passed on.
    seen: list[tuple[str, int]] = field(default_factory=list)
    passed: list[tuple[str, int]] = field(default_factory=list)


class MqttProxy:
    """Passes MQTT packets on, whole, and remembers them. `held` are (direction, type) that do not pass."""

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self._server = socket.create_server((LOOPBACK, 0))
        self.port = int(self._server.getsockname()[1])
        self.links: list[_Link] = []
        self.held: set[tuple[str, int]] = set()
        self._released = threading.Condition()
        self._open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, direction: str, packet_type: int) -> None:
        """Let no packet of this type pass in this direction from now on; what comes behind waits too."""
        self.held.add((direction, packet_type))

    def release(self) -> None:
        """Let everything pass, also what was held."""
        with self._released:
            self.held.clear()
            self._released.notify_all()

    def cut(self) -> None:
        """Close all connections that are open now."""
        for link in self.links:
            for end in link.ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop; everything is closed."""
        self._open = False
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.release()
        self.cut()
        for link in self.links:
            for end in link.ends:
                end.close()

    def count(self, direction: str, packet_type: int, link: int | None = None) -> int:
        """How many packets of a type came in, of one connection or of all; held ones count."""
        links = self.links if link is None else self.links[link : link + 1]
        return sum(found.seen.count((direction, packet_type)) for found in links)

    def count_passed(self, direction: str, packet_type: int) -> int:
        """How many packets of a type were passed on."""
        return sum(found.passed.count((direction, packet_type)) for found in self.links)

    def _accept(self) -> None:
        while self._open:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection((LOOPBACK, self._broker_port), timeout=5)
            except OSError:
                client.close()
                continue
            broker.settimeout(None)
            link = _Link(len(self.links), (client, broker))
            self.links.append(link)
            for direction, source, target in ((UP, client, broker), (DOWN, broker, client)):
                arguments = (link, direction, source, target)
                threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, link: _Link, direction: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError, EOFError):
            while True:
                packet = _read_packet(source)
                seen = (direction, packet[0] >> 4)
                link.seen.append(seen)
                with self._released:
                    self._released.wait_for(lambda seen=seen: seen not in self.held, 60)
                target.sendall(packet)
                link.passed.append(seen)
        for end in link.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _read_packet(source: socket.socket) -> bytes:
    head = _read(source, 1)
    length = shift = 0
    while True:
        byte = _read(source, 1)
        head += byte
        length |= (byte[0] & 0x7F) << shift
        shift += 7
        if not byte[0] & 0x80:
            return head + _read(source, length)


def _read(source: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = source.recv(count - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found
