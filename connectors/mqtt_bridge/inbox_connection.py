"""The bridge's MQTT connection to the agents' inboxes: publish one message and wait for the broker's answer.

Any number of threads publish at once; each waits for its own PUBACK. A connection that is lost is made anew by
the next who publishes.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from paho.mqtt.client import Client, ConnectFlags
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.reasoncodes import ReasonCode

from connectors.mqtt_link.mqtt_connection import (
    broker_name,
    connect_properties,
    cut_connection,
    dial,
    new_client,
)
from schemas.errors import BackboneUnreachable
from schemas.settings.settings import MqttSettings

NOBODY_LISTENS: Final = 0x10


class InboxConnection:
    """`publish` connects when there is no connection. `close` it at the end."""

    def __init__(self, mqtt: MqttSettings) -> None:
        self._mqtt = mqtt
        self._lock = threading.Lock()
        self._link: _Link | None = None

    def publish(self, topic: str, payload: bytes) -> ReasonCode:
        """Publish with QoS 1; the broker's answer. Raises BackboneUnreachable: it may have come even so."""
        return self._live_link().publish(topic, payload)

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None

    def _live_link(self) -> _Link:
        with self._lock:
            if self._link is not None and self._link.lost is not None:
                self._link.close()
                self._link = None
            if self._link is None:
                link = _Link(self._mqtt)
                link.open()
                self._link = link
            return self._link


class _Link:
    """One connection, from CONNECT until it is lost."""

    def __init__(self, mqtt: MqttSettings) -> None:
        self._mqtt = mqtt
        self.lost: str | None = None
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._promises: dict[int, Future[ReasonCode]] = {}
        self._client = new_client(mqtt)
        self._client.on_connect = self._on_connect
        self._client.on_publish = self._on_publish
        self._client.on_disconnect = self._on_disconnect

    def open(self) -> None:
        """Connect. Raises BackboneUnreachable."""
        dial(self._client, self._mqtt, connect_properties(), keepalive_s=self._mqtt.bridge_keepalive_s)
        if not self._answered.wait(self._mqtt.connect_timeout_s):
            self.lost = "no CONNACK in time"
        if self.lost is not None:
            cut_connection(self._client)
            raise self._unreachable(self.lost)

    def publish(self, topic: str, payload: bytes) -> ReasonCode:
        """As InboxConnection's."""
        sent = self._client.publish(topic, payload, qos=1)
        if sent.rc is not MQTTErrorCode.MQTT_ERR_SUCCESS:
            self._lose(f"not sent: {sent.rc!r}")
        promise = self._promise(sent.mid)
        if self.lost is not None:
            self._break(self.lost)
        try:
            return promise.result(self._mqtt.puback_timeout_s)
        except TimeoutError:
            self._lose("no PUBACK in time")
            raise self._unreachable("no PUBACK in time") from None
        finally:
            with self._lock:
                self._promises.pop(sent.mid, None)

    def close(self) -> None:
        """Cut it."""
        cut_connection(self._client)
        self._break(self.lost or "closed")

    def _promise(self, mid: int) -> Future[ReasonCode]:
        # The answer may have come before anybody waits for it.
        with self._lock:
            return self._promises.setdefault(mid, Future())

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        self._answered.set()

    def _break(self, why: str) -> None:
        with self._lock:
            promises = list(self._promises.values())
        for promise in promises:
            with suppress(Exception):  # it is answered already
                promise.set_exception(self._unreachable(why))

    def _unreachable(self, why: str) -> BackboneUnreachable:
        return BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        if reason.is_failure:
            self._lose(f"the broker refuses the bridge: {reason}")
        self._answered.set()

    def _on_publish(self, client: Client, userdata: Any, mid: int, reason: ReasonCode, properties: Any) -> None:
        with suppress(Exception):
            self._promise(mid).set_result(reason)

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        self._lose(f"connection lost: {reason}")
        self._break(f"connection lost: {reason}")
