"""Sends a job's pending events over a fresh MQTT connection and waits for PUBACK and receipt (JE-15, JE-17)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from connectors.agent_sdk.publish_outbox import PendingEvent
from connectors.mqtt_link.job_topics import events_topic, receipts_topic
from connectors.mqtt_link.mqtt_connection import (
    broker_name,
    connect_properties,
    cut_connection,
    dial,
    new_client,
)
from connectors.mqtt_link.mqtt_tls import why_no_answer
from connectors.mqtt_link.receipt import Receipt, read_receipt
from schemas.errors import BackboneUnreachable, Refused
from schemas.settings.settings import MqttSettings
from schemas.wire.record import content_id

_DISCONNECT_S: Final = 1.0
# PUBACK's reason when no client has a subscription that fits, and the pause before the same event goes again.
_NOBODY_LISTENS: Final = 0x10
_AGAIN_S: Final = 0.5
# Reason codes of MQTT 5 that another attempt will not change: bad credentials, not authorized, banned.
_FINAL_REASONS: Final = (0x86, 0x87, 0x8A, 0x8C)
# Of these, what a broker also says at CONNECT while a new job's account is on its way to it.
_NO_ACCOUNT_REASONS: Final = (0x86, 0x87)


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
    """Send `events` in order; `confirmed` is called for each before the next is sent.

    Each attempt is a connection of its own. Socket errors, time-outs and an unknown account (a job's is made
    after its registration) are tried again, up to `publish_attempts` times in all, after
    `min(base * 2^(n-1), max)` seconds. Raises BackboneUnreachable or Refused after the last attempt,
    ReceiptMissing without another attempt, Refused at once when the broker forbids something else.
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
        time.sleep(min(mqtt.backoff_base_s * 2 ** (attempt - 1), mqtt.backoff_max_s))


class DeliveryConnection:
    """One connection of a publisher, subscribed to the job's receipts before anything is sent."""

    def __init__(self, mqtt: MqttSettings, job_id: str, wait_for_receipt: bool) -> None:
        self._mqtt = mqtt
        self._wait_for_receipt = wait_for_receipt
        self._events_topic = events_topic(mqtt.topic_prefix, job_id)
        self._receipts_topic = receipts_topic(mqtt.topic_prefix, job_id)
        self._changed = threading.Condition()
        self._connack: ReasonCode | None = None
        self._suback: ReasonCode | None = None
        self._pubacks: dict[int, ReasonCode] = {}
        self._receipts: dict[str, Receipt] = {}
        self._waiting_for: str | None = None
        self._lost: str | None = None
        self._client = new_client(mqtt)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_publish = self._on_publish
        self._client.on_message = self._on_message
        self._client.on_disconnect = self._on_disconnect

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._mqtt.connect_timeout_s
        dial(self._client, self._mqtt, connect_properties())
        try:
            self._wait(lambda: self._connack, deadline - time.monotonic(), "CONNACK")
            self._admit(self._connack)
            if self._wait_for_receipt:
                self._client.subscribe(self._receipts_topic, qos=1)
                self._wait(lambda: self._suback, self._mqtt.puback_timeout_s, "SUBACK")
                self._permit(self._suback, "reading the job's receipts; --no-receipt does without")
        except BaseException:
            cut_connection(self._client)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._client.disconnect()
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None, _DISCONNECT_S)
        cut_connection(self._client)

    def send(self, pending: PendingEvent) -> Receipt:
        """Publish one event and wait for its PUBACK and, when asked for, its receipt.

        While the broker says that nobody is subscribed, the same bytes go out again: the bridge comes to a
        job's own broker some seconds after the registration.
        """
        ce_id = content_id(self._events_topic.encode("utf-8"), pending.wire_bytes)
        self._waiting_for = ce_id
        deadline = time.monotonic() + self._mqtt.receipt_timeout_s
        while True:
            nobody_listens = self._publish(pending).value == _NOBODY_LISTENS
            if not self._wait_for_receipt:
                return Receipt(ce_id, pending.seq)
            left_s = deadline - time.monotonic()
            wait_s = min(left_s, _AGAIN_S) if nobody_listens else left_s
            with suppress(BackboneUnreachable):
                receipt: Receipt = self._wait(lambda: self._receipts.get(ce_id), wait_s, "receipt")
                return receipt
            if nobody_listens and wait_s < left_s and self._lost is None:
                continue
            raise ReceiptMissing(
                f"no receipt within {self._mqtt.receipt_timeout_s:g} s: the MQTT broker has seq {pending.seq}, "
                "the bridge or Kafka did not confirm it. It stays in the outbox and is sent again, the same, "
                "with the next publish; './trunkline doctor' says what is down"
            )

    def _publish(self, pending: PendingEvent) -> ReasonCode:
        sent = self._client.publish(self._events_topic, pending.wire_bytes, qos=1, retain=pending.is_terminal)
        puback: ReasonCode = self._wait(
            lambda: self._pubacks.get(sent.mid), self._mqtt.puback_timeout_s, "PUBACK"
        )
        self._permit(puback, "publishing this job's events")
        return puback

    def _wait(self, found: Callable[[], Any], timeout_s: float, what: str) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._lost is not None, max(0.0, timeout_s))
            answer = found()
        if answer is None:
            raise self._unreachable(self._lost or f"no {what} in time")
        return answer

    def _admit(self, reason: ReasonCode | None) -> None:
        if reason is not None and reason.value in _NO_ACCOUNT_REASONS:
            raise _NoAccount(
                f"MQTT broker {broker_name(self._mqtt)} does not let user {self._mqtt.username!r} in: "
                f"{reason}. At the backbone's broker the gateway makes a job's account at its registration and "
                "takes it away some time after its end; './trunkline doctor' says whether the gateway runs. At "
                "a broker of the job's own, look at its user and password"
            )
        self._permit(reason, "the connection")

    def _permit(self, reason: ReasonCode | None, what: str) -> None:
        if reason is None or not reason.is_failure:
            return
        if reason.value in _FINAL_REASONS:
            raise Refused(f"MQTT broker {broker_name(self._mqtt)} refuses {what}: {reason}")
        raise self._unreachable(f"{what}: {reason}")

    def _unreachable(self, why: str) -> BackboneUnreachable:
        return BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        with self._changed:
            self._connack = reason
            self._changed.notify_all()

    def _on_subscribe(
        self, client: Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        with self._changed:
            self._suback = reasons[0]
            self._changed.notify_all()

    def _on_publish(self, client: Client, userdata: Any, mid: int, reason: ReasonCode, properties: Any) -> None:
        with self._changed:
            self._pubacks[mid] = reason
            self._changed.notify_all()

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        receipt = read_receipt(bytes(message.payload))
        # Receipts of other events, and whatever a forger publishes here, are not kept.
        if receipt is not None and receipt.ce_id == self._waiting_for:
            with self._changed:
                self._receipts[receipt.ce_id] = receipt
                self._changed.notify_all()

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        with self._changed:
            hint = why_no_answer(self._mqtt) if self._connack is None else ""
            self._lost = f"connection lost: {reason}{hint}"
            self._changed.notify_all()
