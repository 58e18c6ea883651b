"""Sends a job's events over MQTT (JE-15 to JE-17).

**Delivers** each event at least once, in the order of seq, with the same bytes at every attempt.
**Acknowledges when** the receipt confirms that Kafka has the event; without receipts, when the broker has it.
**Loses when** `wait_for_receipt=False` and the broker loses what it acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Final, Self

from paho.mqtt.client import MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from trunkline_agent.broker import BrokerAccess, broker_name, job_broker
from trunkline_agent.errors import BackboneUnreachable, ReceiptMissing, Refused
from trunkline_agent.mqtt.mqtt_client import NOT_AUTHORIZED, PUBLISH_AGAIN_S, PUBLISH_REFUSED
from trunkline_agent.mqtt.mqtt_connection import (
    FINAL_REASONS,
    NO_SUBSCRIBER,
    BrokerRefused,
    MqttConnection,
    Subscription,
    backoff_s,
)
from trunkline_agent.outbox.delivery import Confirmed, Interruption
from trunkline_agent.outbox.outbox import PendingEvent
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.receipt import Receipt, read_receipt
from trunkline_agent.wire.topics import events_topic, receipts_topic

# The pause before an event is published again, when no client was subscribed to its topic.
_AGAIN_S: Final = 0.5


class _NoAccount(Refused):
    """The broker does not know user name and password, perhaps not yet."""


def deliver(
    mqtt: BrokerAccess,
    job_id: str,
    events: Iterable[PendingEvent],
    confirmed: Confirmed,
    *,
    wait_for_receipt: bool = True,
    interruption: Interruption | None = None,
) -> None:
    """Send a job's events to the MQTT broker in order, and return when all are confirmed.

    Each attempt uses a new connection. Socket errors, timeouts and an unknown account are tried again, up to
    `mqtt.publish_attempts` times in all, with back-off. (A job's account is made after its registration.)

    Args:
        mqtt: The broker, with the user and password to use.
        job_id: The job.
        events: The events, already numbered and signed.
        confirmed: Called with each event and its receipt before the next event is sent, whatever verdict the
            receipt has. A receipt without a verdict stands for the broker's PUBACK.
        wait_for_receipt: Whether to wait for Trunkline's receipt. Otherwise the broker's PUBACK is enough.
        interruption: Ends the delivery before its time; None: nothing does.

    Raises:
        BackboneUnreachable: the last attempt failed, or the delivery was interrupted. Events that were
            confirmed before stay confirmed.
        ReceiptMissing: no receipt came in time; there is no other attempt.
        Refused: the broker has no such account after the last attempt, or forbids something else at any time.
    """
    left, stop = list(events), interruption or Interruption()
    for attempt in range(1, mqtt.publish_attempts + 1):
        try:
            with DeliveryConnection(mqtt, job_id, wait_for_receipt, stop) as connection:
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
        stop.pause(backoff_s(mqtt, attempt - 1))


class MqttDelivery:
    """The delivery of one job's events over MQTT.

    Args:
        access: The broker. Without a user name there, the job logs in with its own account.
        job_id: The job.
        secret: The job's secret, from which the password of its account is derived.
    """

    def __init__(self, access: BrokerAccess, job_id: str, secret: str) -> None:
        self._broker = job_broker(access, job_id, secret)
        self._job_id = job_id

    @property
    def longest_s(self) -> float:
        """The longest time in seconds that one event takes."""
        broker = self._broker
        attempt_s = broker.connect_timeout_s + 2 * broker.puback_timeout_s + broker.backoff_max_s
        return broker.publish_attempts * attempt_s + broker.receipt_timeout_s

    def deliver(
        self,
        events: Iterable[PendingEvent],
        confirmed: Confirmed,
        *,
        wait_for_receipt: bool,
        interruption: Interruption,
    ) -> None:
        """Send the events in order, see `deliver` of this module."""
        deliver(
            self._broker,
            self._job_id,
            events,
            confirmed,
            wait_for_receipt=wait_for_receipt,
            interruption=interruption,
        )


class DeliveryConnection:
    """One MQTT connection that sends one job's events. Use it as a context manager.

    Entering connects. It raises Refused when the broker does not permit that, and BackboneUnreachable when it
    does not answer.

    Args:
        mqtt: The broker, with the user and password to use.
        job_id: The job.
        wait_for_receipt: Whether `send` waits for Trunkline's receipt. Otherwise the broker's PUBACK is enough.
        interruption: Ends the connection before its time; None: nothing does.
    """

    def __init__(
        self,
        mqtt: BrokerAccess,
        job_id: str,
        wait_for_receipt: bool,
        interruption: Interruption | None = None,
    ) -> None:
        self._interruption = interruption or Interruption()
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
        self._interruption.also(self._interrupt)
        try:
            self._connection.open()
        except BrokerRefused as error:
            if error.is_bad_login:
                raise _NoAccount(
                    f"MQTT broker {broker_name(self._mqtt)} does not let user {self._mqtt.username!r} in: "
                    f"{error.code}. At the backbone's broker the gateway makes a job's account at its "
                    "registration and removes it some time after its end: './trunkline doctor' shows whether "
                    "the gateway runs. At a broker of the job's own, check its user and password"
                ) from None
            receipts = "reading the job's receipts; --no-receipt does without"
            self._permit(error.code, "the connection" if error.at_login else receipts)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._interruption.forget(self._interrupt)
        if error is None:
            self._connection.close()
        else:
            self._connection.drop()

    def send(self, pending: PendingEvent) -> Receipt:
        """Publish one event, wait until it is confirmed, and return its receipt.

        The broker confirms each event with a PUBACK. If the connection waits for receipts, Trunkline confirms
        it, too, within `mqtt.receipt_timeout_s`. Otherwise the returned receipt has no verdict. While the
        broker reports that no client is subscribed, the same bytes are published again. (The bridge connects to
        a job's own broker some seconds after the registration.)

        Raises:
            ReceiptMissing: No receipt came in time.
            BackboneUnreachable: The connection was lost.
            Refused: The broker does not permit publishing. If it may be a pause (reason 0x87), this is raised
                after the last attempt within `mqtt.receipt_timeout_s`.
        """
        ce_id = content_id(self._events_topic.encode("utf-8"), pending.wire_bytes)
        self._waiting_for, self._receipt = ce_id, None
        deadline = time.monotonic() + self._mqtt.receipt_timeout_s
        while True:
            # A retained end would stay for ever at a broker that is not the stack's own.
            puback = self._connection.publish_and_wait(
                self._events_topic,
                pending.wire_bytes,
                retain=pending.is_terminal,
                expiry_s=self._mqtt.session_expiry_s if pending.is_terminal else None,
            )
            if self._waits_for_right(puback, deadline):
                continue
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

    def _waits_for_right(self, puback: ReasonCode, deadline: float) -> bool:
        """Wait if the broker has refused the event and may take it later. Returns whether to publish again.

        Raises Refused when the time is over, and BackboneUnreachable when the connection is lost meanwhile.
        """
        if puback.value != NOT_AUTHORIZED:
            return False
        if time.monotonic() + PUBLISH_AGAIN_S >= deadline:
            raise Refused(f"MQTT broker {broker_name(self._mqtt)}: {PUBLISH_REFUSED}: {puback}")
        if self._connection.lost.wait(PUBLISH_AGAIN_S):
            raise self._connection.unreachable(self._connection.why)
        return True

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

    def _interrupt(self) -> None:
        self._connection.give_up("interrupted")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
