"""Subscribes to job events over MQTT for `watch`: reconnects by itself and misses nothing (JE-22).

**Delivers** each message at least once, in the broker's order, also what came while the connection was
down: the broker keeps the session, as long as the client id is this one, for ten minutes.
**Acknowledges when** the message is in this process's queue.
**Loses when** this process ends; the next one gets retained terminal events and what comes from then on.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from connectors.mqtt_bridge.bridge_records import well_formed_traceparent
from connectors.mqtt_link.mqtt_connection import (
    broker_name,
    connect_properties,
    cut_connection,
    dial,
    new_client,
)
from schemas.errors import BackboneUnreachable, Refused
from schemas.settings.settings import MqttSettings

SESSION_EXPIRY_S: Final = 600
# Reason codes of MQTT 5 that another attempt will not change: bad credentials, not authorized, banned.
_FINAL_REASONS: Final = (0x86, 0x87, 0x8A, 0x8C)
_TICK_S: Final = 0.25
_STOP_S: Final = 5.0
_DISCONNECT_S: Final = 1.0


class Message(NamedTuple):
    """One MQTT message. `retained`: it was kept by the broker from before the subscription."""

    topic: str
    payload: bytes
    traceparent: str | None
    retained: bool


class EventSubscription:
    """A subscription that lasts over connections. Use it as a context manager; messages go into `found`.

    Entering raises BackboneUnreachable when the broker does not answer, Refused when it forbids it. `lost`
    is told why a connection ended, and None when there is one again.
    """

    def __init__(
        self,
        mqtt: MqttSettings,
        topics: Sequence[str],
        found: queue.Queue[Message],
        *,
        lost: Callable[[str | None], object],
    ) -> None:
        self._mqtt = mqtt
        self._topics = topics
        self._tell = lost
        self._client_id = f"trunkline-watch-{secrets.token_hex(6)}"
        self._found = found
        self._closed = threading.Event()
        self._connection: _Connection | None = None
        self._thread = threading.Thread(target=self._stay_connected, name="subscription", daemon=True)

    def __enter__(self) -> Self:
        mqtt = self._mqtt
        for attempt in range(1, mqtt.publish_attempts + 1):
            try:
                self._connection = self._connect()
                break
            except BackboneUnreachable:
                if attempt == mqtt.publish_attempts:
                    raise
                time.sleep(min(mqtt.backoff_base_s * 2 ** (attempt - 1), mqtt.backoff_max_s))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._connection is not None:
            self._connection.lost.set()
        self._thread.join(_STOP_S)
        if self._connection is not None:
            self._connection.end()

    def _stay_connected(self) -> None:
        failures = 0
        while not self._closed.is_set():
            connection = self._connection
            if connection is not None:
                connection.lost.wait()
                if self._closed.is_set():
                    return
                self._tell(connection.why)
                connection.drop()
                self._connection = None
            try:
                self._connection = self._connect()
                failures = 0
                self._tell(None)
            except (BackboneUnreachable, Refused):
                self._closed.wait(min(self._mqtt.backoff_base_s * 2**failures, self._mqtt.backoff_max_s))
                failures = min(failures + 1, 10)

    def _connect(self) -> _Connection:
        connection = _Connection(self._mqtt, self._client_id, self._topics, self._take)
        connection.open()
        return connection

    def _take(self, message: MQTTMessage) -> None:
        traceparent = well_formed_traceparent(message.properties)
        found = Message(message.topic, bytes(message.payload), traceparent, bool(message.retain))
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._found.put(found, timeout=_TICK_S)
                return


class _Connection:
    """One connection, from CONNECT until it is lost or ended."""

    def __init__(
        self,
        mqtt: MqttSettings,
        client_id: str,
        topics: Sequence[str],
        take: Callable[[MQTTMessage], None],
    ) -> None:
        self._mqtt = mqtt
        self._topics = topics
        self._take = take
        self._client = new_client(mqtt, client_id)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.on_disconnect = self._on_disconnect
        self._answered = threading.Event()
        self._refused: ReasonCode | None = None
        self.lost = threading.Event()
        self.why = ""

    def open(self) -> None:
        """Connect and subscribe. Raises BackboneUnreachable, Refused."""
        dial(self._client, self._mqtt, connect_properties(SESSION_EXPIRY_S), clean_start=False)
        self._answered.wait(self._mqtt.connect_timeout_s)
        if self._answered.is_set() and not self.lost.is_set() and self._refused is None:
            return
        self.drop()
        name = broker_name(self._mqtt)
        if self._refused is not None and self._refused.value in _FINAL_REASONS:
            raise Refused(f"MQTT broker {name} refuses reading job events: {self._refused}")
        raise BackboneUnreachable(f"MQTT broker {name}: {self.why or 'no answer in time'}")

    def end(self) -> None:
        """Disconnect in order; the broker forgets the session."""
        forget = Properties(PacketTypes.DISCONNECT)  # type: ignore[no-untyped-call]
        forget.SessionExpiryInterval = 0
        self.lost.clear()
        self._client.disconnect(properties=forget)
        self.lost.wait(_DISCONNECT_S)
        self.drop()

    def drop(self) -> None:
        """Cut it at once."""
        cut_connection(self._client)

    def _lose(self, why: str) -> None:
        self.why = self.why or why
        self.lost.set()
        self._answered.set()

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        if reason.is_failure:
            self._refused = reason
            self._lose(f"the broker refuses: {reason}")
            return
        # Retained events come with a new subscription, not again with each connection.
        options = SubscribeOptions(qos=1, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)
        client.subscribe([(topic, options) for topic in self._topics])

    def _on_subscribe(
        self, client: Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        refused = [reason for reason in reasons if reason.is_failure]
        if refused:
            self._refused = refused[0]
            self._lose(f"the broker refuses the subscription: {refused[0]}")
            return
        self._answered.set()

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        self._take(message)

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        self._lose(f"connection lost: {reason}")
