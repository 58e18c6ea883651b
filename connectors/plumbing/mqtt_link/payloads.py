"""The payloads that bridges exchange over MQTT, and the figures that a broker publishes about itself.

They are JSON by msgspec, which is faster than the library of agents. By the presence message the bridges of one
broker know the active one (JE-19).

Mosquitto drops a message after its PUBACK when the queue of a session is full. Only a figure and a line in its
log tell. Another broker need not have the topics of figures, and may forbid reading them: they are then
unknown.
"""

from __future__ import annotations

import time
from typing import Final, TypeVar

import msgspec
from paho.mqtt.client import MQTTMessage

from schemas.settings.settings import MqttSettings
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS
from trunkline_agent.wire.receipt import AgentReceipt, Receipt

T = TypeVar("T")

MQTT_DOOR: Final = "mqtt"
"""The door of the records that a bridge appends."""
INBOX_FIELDS: Final = (
    "message_id",
    "from_verified",
    "kind",
    "body",
    "content_type",
    "priority",
    *(one.name for one in MESSAGE_FIELDS),
    "broadcast_id",
    "topic",
    "blob",
    "blob_bytes",
    "blob_type",
    "sent_at",
    "posted_at",
    "expires_at",
)
"""The fields that a message on an agent's inbox topic (JE-26) has under the same name as the mailbox's row.

Beside them the payload has `schema_version` and the sender as `from`.
"""
_encode = msgspec.json.Encoder().encode


def encode_receipt(receipt: Receipt | AgentReceipt) -> bytes:
    """Return the MQTT payload of a receipt: a JSON object with all its fields."""
    return _encode(receipt)


def read_payload(decoder: msgspec.json.Decoder[T], payload: bytes) -> T | None:
    """Decode an MQTT payload with `decoder`. Return None for a payload that it cannot decode. Never raises."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


_SILENCE_KEEPALIVES: Final = 1.5
_SHOWINGS_PER_KEEPALIVE: Final = 4


class Presence(msgspec.Struct, frozen=True):
    """The message on the presence topic: the bridge that published it, and whether that bridge is active."""

    bridge: str
    active: bool


_decoder = msgspec.json.Decoder(Presence)
encode_presence = msgspec.json.Encoder().encode


def read_presence(payload: bytes) -> Presence | None:
    """Decode a bridge's presence message from an MQTT payload. Return None for any other payload.

    Never raises.
    """
    return read_payload(_decoder, payload)


def presence_topic(mqtt: MqttSettings) -> str:
    """Return the topic on which bridges with the client id `mqtt.bridge_client_id` publish their presence.

    The topic filter of job events does not match this topic.
    """
    return f"{mqtt.topic_prefix}/bridge/{mqtt.bridge_client_id}"


def showing_interval_s(mqtt: MqttSettings) -> float:
    """Return the interval, in seconds, at which the active bridge publishes its presence message."""
    return mqtt.bridge_keepalive_s / _SHOWINGS_PER_KEEPALIVE


def silence_s(mqtt: MqttSettings) -> float:
    """Return how many seconds without a presence message make the active bridge count as silent.

    A bridge on standby then takes over.
    """
    return _SILENCE_KEEPALIVES * mqtt.bridge_keepalive_s


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
