"""Plain MQTT for tests: publish and listen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paho.mqtt.client import MQTTMessage
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from schemas.settings.settings import MqttSettings
from tests.broker_processes import wait_until
from trunkline_agent.mqtt.mqtt_client import connect_properties, cut_connection, dial, new_client


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
