"""The presence message by which the bridges of one MQTT broker know the active one (JE-19)."""

from __future__ import annotations

from typing import Final

import msgspec

from connectors.plumbing.mqtt_link.payloads import read_payload
from schemas.settings.settings import MqttSettings

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
