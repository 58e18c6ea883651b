"""The active bridge's second MQTT connection: receipts (JE-17), and its presence (JE-19).

It has a thread of its own to read the broker's PUBACKs, so the first connection may stop reading events while
receipts are slow. With one connection for both, the wait would keep out what ends it. For the same reason it is
this one that has the short keepalive and the Last Will: its thread never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from paho.mqtt.client import Client, ConnectFlags
from paho.mqtt.reasoncodes import ReasonCode

from connectors.mqtt_bridge.bridge_standby import Presence, encode_presence, presence_topic
from connectors.mqtt_link.mqtt_connection import (
    broker_name,
    connect_properties,
    cut_connection,
    dial,
    new_client,
)
from schemas.errors import BackboneUnreachable
from schemas.settings.settings import MqttSettings

_Taken = Callable[[], None]


def _broker_was_faster() -> None:
    """Stands where the PUBACK came before the bookkeeping."""


def _shown() -> None:
    """Nobody waits for a presence."""


_EARLY: Final[_Taken] = _broker_was_faster
_DISCONNECT_S: Final = 0.5


class ReceiptChannel:
    """Publishes receipts, QoS 1. `on_lost(why)` is called when the connection is gone, `on_refused()` when the
    broker takes a receipt but does not let it through (its ACL). `bridge` is our name on the presence topic.
    """

    def __init__(
        self, mqtt: MqttSettings, bridge: str, on_lost: Callable[[str], None], on_refused: Callable[[], None]
    ) -> None:
        self._mqtt = mqtt
        self._presence = encode_presence(Presence(bridge, active=True))
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._waiting: dict[int, _Taken] = {}
        self._answered = threading.Event()
        self._refusal: str | None = None
        self._gone = threading.Event()
        self._client = new_client(mqtt)
        absence = encode_presence(Presence(bridge, active=False))
        self._client.will_set(presence_topic(mqtt), absence, qos=1, retain=True)
        self._client.on_connect = self._on_connect
        self._client.on_publish = self._on_publish
        self._client.on_disconnect = self._on_disconnect

    def open(self) -> None:
        """Connect. Raises BackboneUnreachable when that takes longer than `connect_timeout_s`."""
        dial(self._client, self._mqtt, connect_properties(), keepalive_s=self._mqtt.bridge_keepalive_s)
        if not self._answered.wait(self._mqtt.connect_timeout_s) or self._refusal:
            self.drop()
            why = self._refusal or "no CONNACK in time"
            raise BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")

    def send(self, topic: str, payload: bytes, taken: _Taken) -> None:
        """Publish one receipt; `taken` is called, on any thread, when the broker has it."""
        self._publish(topic, payload, taken, qos=1)

    def show_presence(self) -> None:
        """Say that this bridge is the active one, retained."""
        # QoS 0: it must not wait behind receipts, and the next one comes soon.
        self._publish(presence_topic(self._mqtt), self._presence, _shown, qos=0, retain=True)

    def drop(self) -> None:
        """End the connection at once; the broker says by our Last Will that this bridge is gone."""
        cut_connection(self._client)

    def leave(self) -> None:
        """End the connection without the Last Will: another bridge may be the active one already."""
        self._client.disconnect()
        self._gone.wait(_DISCONNECT_S)
        cut_connection(self._client)

    def _publish(self, topic: str, payload: bytes, taken: _Taken, *, qos: int, retain: bool = False) -> None:
        sent = self._client.publish(topic, payload, qos, retain)
        # No lock here: paho holds one of its own while it calls `_on_publish`.
        if self._waiting.setdefault(sent.mid, taken) is _EARLY:
            del self._waiting[sent.mid]
            taken()

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        self._refusal = str(reason) if reason.is_failure else None
        self._answered.set()

    def _on_publish(self, client: Client, userdata: Any, mid: int, reason: ReasonCode, properties: Any) -> None:
        if reason.is_failure and reason.value != 0x10:  # "no matching subscribers" is no failure
            self._on_refused()
        taken = self._waiting.setdefault(mid, _EARLY)
        if taken is not _EARLY:
            del self._waiting[mid]
            taken()

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        self._gone.set()
        self._refusal = f"connection lost: {reason}"
        self._answered.set()
        self._on_lost(f"receipts: connection lost: {reason}")
