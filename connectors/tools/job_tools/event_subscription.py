"""A subscription to job events over MQTT for `watch`, which reconnects by itself and misses nothing (JE-22).

**Delivers** each message at least once, in the broker's order, also those that came while the connection was
down: the broker keeps the session of this client id for ten minutes.
**Acknowledges when** the message is in this process's queue.
**Loses when** this process ends. The next one gets retained terminal events and new messages.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Self

from paho.mqtt.client import MQTTMessage

from schemas.settings.settings import MqttSettings
from trunkline_agent.broker import broker_name
from trunkline_agent.errors import BackboneUnreachable, Refused
from trunkline_agent.mqtt.mqtt_connection import (
    FINAL_REASONS,
    RETAINED_ONCE,
    BrokerRefused,
    MqttConnection,
    Subscription,
    backoff_s,
)
from trunkline_agent.wire.traceparent import well_formed_traceparent

SESSION_EXPIRY_S: Final = 600
_TICK_S: Final = 0.25
_STOP_S: Final = 5.0


class Message(NamedTuple):
    """One MQTT message that came in a subscription.

    Attributes:
        topic: The topic that it was published on.
        payload: Its bytes.
        traceparent: The W3C trace context that its sender gave; None without a well-formed one.
        retained: Whether the broker had kept it as a retained message from before the subscription.
    """

    topic: str
    payload: bytes
    traceparent: str | None
    retained: bool


class EventSubscription:
    """A subscription to MQTT topics that reconnects by itself. Use it as a context manager.

    Entering connects and starts a thread. It raises BackboneUnreachable when the broker does not answer in any
    of `mqtt.publish_attempts` attempts, and Refused when the broker forbids reading. Leaving the `with` block
    ends the thread and the subscription.

    Args:
        mqtt: The settings of the broker and of the attempts.
        topics: The topics to subscribe to, which may have wildcards.
        found: The queue into which the messages go. While it is full, the broker keeps further messages.
        lost: Called on the thread with the reason when a connection ends, and with None when there is a new
            one.
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
        self._report = lost
        self._client_id = f"trunkline-watch-{secrets.token_hex(16)}"
        self._found = found
        self._closed = threading.Event()
        self._connection: MqttConnection | None = None
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
                time.sleep(backoff_s(mqtt, attempt - 1))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._connection is not None:
            self._connection.give_up("closed")
        self._thread.join(_STOP_S)
        if self._connection is not None:
            self._connection.close(forget_session=True)

    def _stay_connected(self) -> None:
        failures = 0
        while not self._closed.is_set():
            connection = self._connection
            if connection is not None:
                connection.lost.wait()
                if self._closed.is_set():
                    return
                self._report(connection.why)
                connection.drop()
                self._connection = None
            try:
                self._connection = self._connect()
                failures = 0
                self._report(None)
            except (BackboneUnreachable, Refused):
                self._closed.wait(backoff_s(self._mqtt, failures))
                failures += 1

    def _connect(self) -> MqttConnection:
        connection = MqttConnection(
            self._mqtt,
            [Subscription(topic, retain_handling=RETAINED_ONCE) for topic in self._topics],
            client_id=self._client_id,
            session_expiry_s=SESSION_EXPIRY_S,
            on_message=self._take,
        )
        try:
            connection.open()
        except BrokerRefused as error:
            if error.code.value in FINAL_REASONS:
                name = broker_name(self._mqtt)
                raise Refused(f"MQTT broker {name} refuses reading job events: {error.code}") from None
            raise
        return connection

    def _take(self, message: MQTTMessage) -> None:
        traceparent = well_formed_traceparent(message.properties)
        found = Message(message.topic, bytes(message.payload), traceparent, bool(message.retain))
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._found.put(found, timeout=_TICK_S)
                return
