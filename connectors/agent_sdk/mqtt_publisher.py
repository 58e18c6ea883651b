"""A publisher of a job's events over MQTT (JE-15 to JE-17).

It numbers and signs events, and keeps them on disk until they are confirmed.

**Delivers** each event at least once, in the order of seq, with the same bytes at every attempt. Only after a
rotation of the secret an event gets a new signature; the backbone recognises it by its content.
**Acknowledges when** the receipt confirms that Kafka has the event; without receipts, when the broker has it.
**Loses when** `wait_for_receipt=False` and the broker loses what it acknowledged.

    publisher = JobPublisher(settings, "0a1b2c3d", secret, Path("state"))
    publisher.publish("started", "build begins")
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from connectors.agent_sdk.mqtt_delivery import deliver
from connectors.agent_sdk.outbox import JobOutbox, PendingEvent, content_fault
from connectors.mqtt_link.mqtt_credentials import job_mqtt
from connectors.mqtt_link.receipt import Receipt
from schemas.errors import Refused, UsageError
from schemas.settings.settings import Settings
from schemas.streams.job.job_event import PERMISSION_REQUIRED, STARTED, event_fault
from schemas.wire.field_checks import SCHEMA_VERSION
from schemas.wire.ids import is_job_id
from schemas.wire.masking import carries_token
from schemas.wire.signing import SIGNATURE_FIELD, Signer, sign_event, signed_bytes
from schemas.wire.strict_json import canonical, decode
from schemas.wire.unsafe_text import unsafe_pattern
from schemas.wire.verdicts import REJECTED

__all__ = ["EventRejected", "JobPublisher", "Receipt"]
_LOCK_MARGIN_S: Final = 5.0


class EventRejected(Refused):
    """An event was settled as rejected, for the reason in `receipt`. Sending it again will not help."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(f"seq {receipt.seq} was rejected: {receipt.reason or 'no reason given'}")
        self.receipt = receipt


class JobPublisher:
    """Publishes the events of one job. `state_dir` keeps its seq and outbox; `secret` only signs."""

    def __init__(self, settings: Settings, job_id: str, secret: str, state_dir: Path) -> None:
        if not is_job_id(job_id):
            raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
        if not secret:
            raise UsageError("the job's secret is empty; 'trunkline jobs register' prints it once")
        self._settings = settings
        self._job_id = job_id
        self._secret = secret
        self._state_dir = state_dir

    def publish(
        self, event: str, detail: str, data: dict[str, Any] | None = None, *, wait_for_receipt: bool = True
    ) -> Receipt:
        """Send one event, after those that are still in the outbox, and return its receipt.

        A terminal event may be published again until it is confirmed; it is the same event.

        Raises:
            UsageError: the event is invalid; nothing was sent.
            EventRejected: the event was settled as rejected.
            Refused: the broker forbids it.
            BackboneUnreachable: the event is not confirmed. It stays in the outbox and is sent first at the
                next call, so do not publish it again.
        """
        body = self._body(event, detail, data)
        with self._outbox() as outbox:
            outbox.renew(self._signed_anew)
            return self._deliver(outbox, self._enter(outbox, body), wait_for_receipt)

    def resend(self, *, wait_for_receipt: bool = True) -> int:
        """Send the events in the outbox and return their number. Raises as `publish` does."""
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
