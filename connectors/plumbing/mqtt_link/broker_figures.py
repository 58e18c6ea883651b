"""The figures that an MQTT broker publishes about itself: dropped messages, stored bytes and memory.

Mosquitto drops a message after its PUBACK when the queue of a session is full. Only this figure and a line in
its log tell. Another broker need not have the topics, and may forbid reading them: they are then unknown.
"""

from __future__ import annotations

import time
from typing import Final

from paho.mqtt.client import MQTTMessage

from schemas.settings.settings import MqttSettings
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription

DROPPED: Final = "$SYS/broker/publish/messages/dropped"
STORED_BYTES: Final = "$SYS/broker/store/messages/bytes"
HEAP_BYTES: Final = "$SYS/broker/heap/current"
FIGURES: Final = (DROPPED, STORED_BYTES, HEAP_BYTES)
_DIGITS_MOST: Final = 20
_TICK_S: Final = 0.02


def read_figure(payload: bytes) -> int | None:
    """Return the number in the payload of one of the topics in `FIGURES`. None for any other payload."""
    is_number = len(payload) <= _DIGITS_MOST and payload.isdigit()
    return int(payload) if is_number else None


def dropped_messages(mqtt: MqttSettings, wait_s: float) -> int | None:
    """Return how many messages the broker has dropped since its start. None: it does not say so. Blocks.

    Raises BackboneUnreachable when the broker does not answer or refuses the login.

    Args:
        mqtt: the broker, and a login that may read the topic.
        wait_s: how many seconds to wait for the retained figure.
    """
    found: list[int] = []

    def take(message: MQTTMessage) -> None:
        figure = read_figure(bytes(message.payload))
        if figure is not None:
            found.append(figure)

    wanted = Subscription(DROPPED, qos=0, on_refused=lambda _reason: None)
    connection = MqttConnection(mqtt, [wanted], on_message=take)
    try:
        connection.open()
        deadline = time.monotonic() + wait_s
        while not found and not connection.lost.is_set() and time.monotonic() < deadline:
            connection.lost.wait(_TICK_S)
        connection.close()
    finally:
        connection.drop()
    return found[-1] if found else None
