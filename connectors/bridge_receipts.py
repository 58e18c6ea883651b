"""The bridge's second MQTT connection, for receipts alone (JE-17).

It has a thread of its own to read the broker's PUBACKs, so the first connection may stop reading events while
receipts are slow. With one connection for both, the wait would keep out what ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from paho.mqtt.client import Client, ConnectFlags
from paho.mqtt.reasoncodes import ReasonCode

from connectors.job_topics import receipts_topic
from connectors.mqtt_connection import (
    broker_name,
    connect_properties,
    cut_connection,
    dial,
    new_client,
)
from schemas.errors import BackboneUnreachable
from schemas.settings import MqttSettings

_Taken = Callable[[], None]


def _broker_was_faster() -> None:
    """Stands where the PUBACK came before the bookkeeping."""


_EARLY: Final[_Taken] = _broker_was_faster


class ReceiptChannel:
    """Publishes receipts, QoS 1. `on_lost(why)` is called when the connection is gone, `on_refused()` when the
    broker takes a receipt but does not let it through (its ACL).
    """

    def __init__(
        self, mqtt: MqttSettings, on_lost: Callable[[str], None], on_refused: Callable[[], None]
    ) -> None:
        self._mqtt = mqtt
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._waiting: dict[int, _Taken] = {}
        self._answered = threading.Event()
        self._refusal: str | None = None
        self._client = new_client(mqtt)
        self._client.on_connect = self._on_connect
        self._client.on_publish = self._on_publish
        self._client.on_disconnect = self._on_disconnect

    def open(self) -> None:
        """Connect. Raises BackboneUnreachable when that takes longer than `connect_timeout_s`."""
        dial(self._client, self._mqtt, connect_properties())
        if not self._answered.wait(self._mqtt.connect_timeout_s) or self._refusal:
            self.drop()
            why = self._refusal or "no CONNACK in time"
            raise BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")

    def send(self, job_id: str, payload: bytes, taken: _Taken) -> None:
        """Publish one receipt; `taken` is called, on any thread, when the broker has it."""
        sent = self._client.publish(receipts_topic(self._mqtt.topic_prefix, job_id), payload, qos=1)
        # No lock here: paho holds one of its own while it calls `_on_publish`.
        if self._waiting.setdefault(sent.mid, taken) is _EARLY:
            del self._waiting[sent.mid]
            taken()

    def drop(self) -> None:
        """End the connection at once."""
        cut_connection(self._client)

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
        self._refusal = f"connection lost: {reason}"
        self._answered.set()
        self._on_lost(f"receipts: connection lost: {reason}")
