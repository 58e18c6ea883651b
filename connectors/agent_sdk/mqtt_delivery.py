"""Deliver a job's pending events over a new MQTT connection: wait for PUBACK and receipt (JE-15, JE-17)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from paho.mqtt.client import MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from connectors.agent_sdk.outbox import PendingEvent
from connectors.mqtt_link.broker_settings import broker_name
from connectors.mqtt_link.mqtt_connection import (
    FINAL_REASONS,
    NO_SUBSCRIBER,
    BrokerRefused,
    MqttConnection,
    Subscription,
    backoff_s,
)
from connectors.mqtt_link.mqtt_login import BAD_LOGIN
from connectors.mqtt_link.receipt import Receipt, read_receipt
from connectors.mqtt_link.topics import events_topic, receipts_topic
from schemas.errors import BackboneUnreachable, Refused
from schemas.settings.settings import MqttSettings
from schemas.wire.record import content_id

# The pause before an event is published again, when no client was subscribed to its topic.
_AGAIN_S: Final = 0.5


class ReceiptMissing(BackboneUnreachable):
    """The broker took the event, but no receipt came in time: the bridge or Kafka is down, or slow."""


class _NoAccount(Refused):
    """The broker does not know user name and password, perhaps not yet."""


def deliver(
    mqtt: MqttSettings,
    job_id: str,
    events: Iterable[PendingEvent],
    confirmed: Callable[[PendingEvent, Receipt], None],
    *,
    wait_for_receipt: bool = True,
) -> None:
    """Send `events` in order. `confirmed` is called for each event before the next one is sent.

    Each attempt uses a new connection. Socket errors, timeouts and an unknown account are tried again, up to
    `publish_attempts` times in all, with back-off. (A job's account is made after its registration.)

    Raises:
        BackboneUnreachable: the last attempt failed.
        ReceiptMissing: no receipt came in time; there is no other attempt.
        Refused: the broker has no such account after the last attempt, or forbids something else at any time.
    """
    left = list(events)
    for attempt in range(1, mqtt.publish_attempts + 1):
        try:
            with DeliveryConnection(mqtt, job_id, wait_for_receipt) as connection:
                while left:
                    confirmed(left[0], connection.send(left[0]))
                    left.pop(0)
            return
        except ReceiptMissing:
            raise
        except (BackboneUnreachable, _NoAccount) as error:
            if attempt == mqtt.publish_attempts:
                kind = Refused if isinstance(error, _NoAccount) else BackboneUnreachable
                raise kind(f"{error} ({attempt} attempt{'s' if attempt > 1 else ''})") from error
        time.sleep(backoff_s(mqtt, attempt - 1))


class DeliveryConnection:
    """One connection for one job's events. Entering raises Refused or BackboneUnreachable."""

    def __init__(self, mqtt: MqttSettings, job_id: str, wait_for_receipt: bool) -> None:
        self._mqtt = mqtt
        self._wait_for_receipt = wait_for_receipt
        self._events_topic = events_topic(mqtt.topic_prefix, job_id)
        self._changed = threading.Condition()
        self._waiting_for: str | None = None
        self._receipt: Receipt | None = None
        receipts = [Subscription(receipts_topic(mqtt.topic_prefix, job_id))] if wait_for_receipt else []
        self._connection = MqttConnection(
            mqtt, receipts, on_message=self._on_message, on_lost=lambda _why: self._notify()
        )

    def __enter__(self) -> Self:
        try:
            self._connection.open()
        except BrokerRefused as error:
            if error.at_login and error.reason.value in BAD_LOGIN:
                raise _NoAccount(
                    f"MQTT broker {broker_name(self._mqtt)} does not let user {self._mqtt.username!r} in: "
                    f"{error.reason}. At the backbone's broker the gateway makes a job's account at its "
                    "registration and removes it some time after its end: './trunkline doctor' shows whether "
                    "the gateway runs. At a broker of the job's own, check its user and password"
                ) from None
            receipts = "reading the job's receipts; --no-receipt does without"
            self._permit(error.reason, "the connection" if error.at_login else receipts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._connection.close()
        else:
            self._connection.drop()

    def send(self, pending: PendingEvent) -> Receipt:
        """Publish one event and wait for its PUBACK and, if wanted, for its receipt.

        While the broker reports that no client is subscribed, the same bytes are published again: the bridge
        connects to a job's own broker some seconds after the registration.
        """
        ce_id = content_id(self._events_topic.encode("utf-8"), pending.wire_bytes)
        self._waiting_for, self._receipt = ce_id, None
        deadline = time.monotonic() + self._mqtt.receipt_timeout_s
        while True:
            puback = self._connection.publish_and_wait(
                self._events_topic, pending.wire_bytes, retain=pending.is_terminal
            )
            self._permit(puback, "publishing this job's events")
            if not self._wait_for_receipt:
                return Receipt(ce_id, pending.seq)
            left_s = deadline - time.monotonic()
            publish_again = puback.value == NO_SUBSCRIBER and left_s > _AGAIN_S
            receipt = self._wait_receipt(_AGAIN_S if publish_again else left_s)
            if receipt is not None:
                return receipt
            if not publish_again or self._connection.lost.is_set():
                raise ReceiptMissing(
                    f"no receipt within {self._mqtt.receipt_timeout_s:g} s: the MQTT broker has seq "
                    f"{pending.seq}, but the bridge or Kafka did not confirm it. It stays in the outbox and is "
                    "sent again, unchanged, with the next publish; './trunkline doctor' shows what is down"
                )

    def _wait_receipt(self, timeout_s: float) -> Receipt | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._receipt is not None or self._connection.lost.is_set(), max(0.0, timeout_s)
            )
            return self._receipt

    def _permit(self, reason: ReasonCode, what: str) -> None:
        if reason.value in FINAL_REASONS:
            raise Refused(f"MQTT broker {broker_name(self._mqtt)} refuses {what}: {reason}")
        if reason.is_failure:
            raise self._connection.unreachable(f"{what}: {reason}")

    def _on_message(self, message: MQTTMessage) -> None:
        receipt = read_receipt(bytes(message.payload))
        # Receipts of other events, and anything that a forger publishes here, are ignored.
        if receipt is not None and receipt.ce_id == self._waiting_for:
            self._receipt = receipt
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
