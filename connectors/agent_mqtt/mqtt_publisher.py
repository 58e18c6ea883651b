"""A publisher of a job's events over MQTT (JE-15 to JE-17), or over HTTP (DL-08).

It numbers and signs events, and keeps them on disk until they are confirmed.

**Delivers** each event at least once, in the order of seq, with the same bytes at every attempt. Only after a
rotation of the secret an event gets a new signature; the backbone recognises it by its content.
**Acknowledges when** the receipt confirms that Kafka has the event; without receipts, when the broker has it.
**Loses when** `wait_for_receipt=False` and the broker loses what it acknowledged.

    publisher = JobPublisher(settings, "0a1b2c3d", secret, Path("state"))
    publisher.publish("started", "build begins")
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from paho.mqtt.client import MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from connectors.agent_mqtt.http_delivery import deliver_over_http
from connectors.agent_mqtt.outbox import JobOutbox, PendingEvent, content_fault
from connectors.gateway_client.gateway_client import GatewayClient
from connectors.mqtt_link.broker_settings import broker_name
from connectors.mqtt_link.mqtt_connection import (
    FINAL_REASONS,
    NO_SUBSCRIBER,
    BrokerRefused,
    MqttConnection,
    Subscription,
    backoff_s,
)
from connectors.mqtt_link.mqtt_credentials import job_mqtt
from connectors.mqtt_link.mqtt_login import BAD_LOGIN
from connectors.mqtt_link.publish_refusal import NOT_AUTHORIZED, PUBLISH_AGAIN_S, PUBLISH_REFUSED
from connectors.mqtt_link.receipt import Receipt, read_receipt
from connectors.mqtt_link.topics import events_topic, receipts_topic
from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.job.job_event import PERMISSION_REQUIRED, STARTED, event_fault
from trunkline_agent.errors import BackboneUnreachable, Refused, UsageError
from trunkline_agent.wire.content_id import content_id
from trunkline_agent.wire.field_checks import SCHEMA_VERSION
from trunkline_agent.wire.ids import is_job_id
from trunkline_agent.wire.masking import carries_token
from trunkline_agent.wire.signing import SIGNATURE_FIELD, Signer, sign_event, signed_bytes
from trunkline_agent.wire.strict_json import canonical, decode
from trunkline_agent.wire.unsafe_text import unsafe_pattern
from trunkline_agent.wire.verdicts import REJECTED

# The pause before an event is published again, when no client was subscribed to its topic.
_AGAIN_S: Final = 0.5
_LOCK_MARGIN_S: Final = 5.0


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
    """Send a job's events to the MQTT broker in order, and return when all are confirmed.

    Each attempt uses a new connection. Socket errors, timeouts and an unknown account are tried again, up to
    `mqtt.publish_attempts` times in all, with back-off. (A job's account is made after its registration.)

    Args:
        mqtt: The settings of the broker, with the user and password to use.
        job_id: The job.
        events: The events, already numbered and signed.
        confirmed: Called with each event and its receipt before the next event is sent, whatever verdict the
            receipt has. A receipt without a verdict stands for the broker's PUBACK.
        wait_for_receipt: Whether to wait for Trunkline's receipt. Otherwise the broker's PUBACK is enough.

    Raises:
        BackboneUnreachable: the last attempt failed. Events that were confirmed before stay confirmed.
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
    """One MQTT connection that sends one job's events. Use it as a context manager.

    Entering connects. It raises Refused when the broker does not permit that, and BackboneUnreachable when it
    does not answer.

    Args:
        mqtt: The settings of the broker, with the user and password to use.
        job_id: The job.
        wait_for_receipt: Whether `send` waits for Trunkline's receipt. Otherwise the broker's PUBACK is enough.
    """

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

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
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
            puback = self._connection.publish_and_wait(
                self._events_topic, pending.wire_bytes, retain=pending.is_terminal
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

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class EventRejected(Refused):
    """Trunkline rejected a sent event, for the reason in `receipt`. Sending it again will not help."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(f"seq {receipt.seq} was rejected: {receipt.reason or 'no reason given'}")
        self.receipt = receipt


class JobPublisher:
    """The publisher of one job's events, which numbers and signs them and stores them until they are confirmed.

    It connects for each call. Only one process at a time can publish for a job in one `state_dir`.

    Args:
        settings: The settings of the broker and of limits.
        job_id: The job.
        secret: The job's secret, which signs the events and is never sent.
        state_dir: The folder with the job's last seq and its unconfirmed events.
        gateway: The gateway to send the events to. None sends them over MQTT.
    """

    def __init__(
        self,
        settings: Settings,
        job_id: str,
        secret: str,
        state_dir: Path,
        gateway: GatewayClient | None = None,
    ) -> None:
        if not is_job_id(job_id):
            raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
        if not secret:
            raise UsageError("the job's secret is empty; 'trunkline jobs register' prints it once")
        self._settings = settings
        self._job_id = job_id
        self._secret = secret
        self._state_dir = state_dir
        self._gateway = gateway

    def publish(
        self, event: str, detail: str, data: dict[str, Any] | None = None, *, wait_for_receipt: bool = True
    ) -> Receipt:
        """Send one event, after earlier unconfirmed ones, and return its receipt.

        It blocks until the event is confirmed or all attempts have failed. An event that ends the job may be
        published again until it is confirmed: it is the same event.

        Args:
            event: The type of the event, such as `started`.
            detail: A text about the event for people.
            data: More fields, as JSON values.
            wait_for_receipt: Whether to wait for Trunkline's receipt. Otherwise the broker's PUBACK is enough,
                and the returned receipt has no verdict. Over HTTP there is always a receipt.

        Raises:
            UsageError: the event is invalid, or the job has ended; nothing was sent.
            EventRejected: Trunkline rejected this or an earlier event.
            Refused: the broker forbids publishing. The event stays in the outbox.
            BackboneUnreachable: the event is not confirmed. It stays in the outbox and is sent first at the
                next call, so do not publish it again.
            OutboxBusyError: another process is publishing for this job.
        """
        body = self._body(event, detail, data)
        with self._outbox() as outbox:
            outbox.renew(self._signed_anew)
            return self._deliver(outbox, self._enter(outbox, body), wait_for_receipt)

    def resend(self, *, wait_for_receipt: bool = True) -> int:
        """Send all events that are not confirmed yet, and return how many they were; 0 if there were none.

        For `wait_for_receipt` and the errors see `publish`.
        """
        with self._outbox() as outbox:
            outbox.renew(self._signed_anew)
            count = len(outbox.pending)
            if count:
                self._deliver(outbox, outbox.pending[-1], wait_for_receipt)
            return count

    def _outbox(self) -> JobOutbox:
        mqtt = self._settings.mqtt
        attempt_s = mqtt.connect_timeout_s + 2 * mqtt.puback_timeout_s + mqtt.backoff_max_s
        longest_s = mqtt.publish_attempts * attempt_s + mqtt.receipt_timeout_s + _LOCK_MARGIN_S
        return JobOutbox(self._state_dir, self._job_id, longest_s)

    def _enter(self, outbox: JobOutbox, body: dict[str, Any]) -> PendingEvent:
        if outbox.ended_seq is not None:
            # The caller publishes the unconfirmed end again: it is the same event, not a second one.
            for pending in outbox.pending:
                if pending.seq == outbox.ended_seq and _same_event(pending.fields(), body):
                    return pending
            raise UsageError(f"job {self._job_id} has ended with seq {outbox.ended_seq}: nothing may follow")
        if body["event"] == STARTED and outbox.last_seq:
            raise UsageError(f"'{STARTED}' is the first event of a job; this one is at seq {outbox.last_seq}")
        return outbox.add(body["event"], lambda seq: self._signed(body, seq))

    def _deliver(self, outbox: JobOutbox, wanted: PendingEvent, wait_for_receipt: bool) -> Receipt:
        receipts: dict[int, Receipt] = {}

        def confirmed(pending: PendingEvent, receipt: Receipt) -> None:
            outbox.confirm(pending, rejected=receipt.verdict == REJECTED)
            receipts[pending.seq] = receipt

        if self._gateway is not None:
            deliver_over_http(self._gateway, self._job_id, outbox.pending, confirmed)
        else:
            mqtt = job_mqtt(self._settings.mqtt, self._job_id, self._secret)
            deliver(mqtt, self._job_id, outbox.pending, confirmed, wait_for_receipt=wait_for_receipt)
        for receipt in (receipts[wanted.seq], *receipts.values()):
            if receipt.verdict == REJECTED:
                raise EventRejected(receipt)
        return receipts[wanted.seq]

    def _signed(self, body: dict[str, Any], seq: int) -> bytes:
        payload = canonical(sign_event({**body, "seq": seq}, self._secret))
        limit = self._settings.limits.payload_bytes
        if len(payload) > limit:
            raise UsageError(f"the event has {len(payload)} bytes; at most {limit} are taken")
        return payload

    def _signed_anew(self, pending: PendingEvent) -> bytes | None:
        """Return a pending event signed with the current secret, None when it is signed with it already."""
        event, _ = decode(pending.wire_bytes)
        if Signer(self._secret).verifies(signed_bytes(event), event["data"].get(SIGNATURE_FIELD)):
            return None
        return canonical(sign_event(event, self._secret))

    def _body(self, event: str, detail: str, data: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        body: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "job_id": self._job_id,
            "event": event,
            "timestamp": now,
            "detail": detail,
            "data": {} if data is None else data,
        }
        fault = event_fault({**body, "seq": 1}) or self._content_fault(body)
        if fault is not None:
            raise UsageError(f"not sent: {fault}")
        return body

    def _content_fault(self, body: dict[str, Any]) -> str | None:
        if body["event"] == PERMISSION_REQUIRED and not body["detail"].strip():
            return f"detail: '{PERMISSION_REQUIRED}' must name the permission that it asks for"
        if carries_token(body):
            return "data.auth_token: a token must not travel in an event"
        if SIGNATURE_FIELD in body["data"]:
            return f"data.{SIGNATURE_FIELD}: only the publisher sets it"
        pattern = unsafe_pattern(body["detail"])
        if pattern is not None:
            return f"detail: contains text that looks like a {pattern} (docs: the table of unsafe texts)"
        return content_fault(body, self._secret)


def _same_event(sent: dict[str, Any], body: dict[str, Any]) -> bool:
    data = {k: v for k, v in sent["data"].items() if k != SIGNATURE_FIELD}
    return (sent["event"], sent["detail"], data) == (body["event"], body["detail"], body["data"])
