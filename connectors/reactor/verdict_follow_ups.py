"""What follows from a record by its verdict: an agent's word over MQTT becomes a message (JE-26), or the agent
is told why not; and who registered a job hears that it needs permission.

Told from the record, its verdict and the rows alone, as those of `follow_ups`: the same, whoever derives it.
"""

from __future__ import annotations

from typing import Any, Final

from connectors.mqtt_bridge.bridge_records import DOOR as MQTT
from connectors.reactor.follow_ups import DOOR, Rows, follow_up_id
from connectors.reactor.known_recipients import has_mailbox
from schemas.fold.view_rows import MAILBOX_VIEW, REGISTRY_JOBS, JobRow
from schemas.streams.agents.mqtt_agents import body_text
from schemas.streams.job.job_event import PERMISSION_REQUIRED
from schemas.streams.job.job_registry import PERMISSION
from schemas.streams.principal.principals import REACTOR, SENDER
from schemas.wire.ids import AGENT, JOB, MAILBOX, is_name, parse_stream_key
from schemas.wire.masking import MASK, mask_event
from schemas.wire.message import DEFAULT_REALM, Message, posting_record
from schemas.wire.record import (
    AGENT_SAID,
    JOB_EVENT,
    MESSAGE_POSTED,
    BadEnvelopeError,
    Envelope,
    OutgoingRecord,
    Record,
    read_envelope,
)
from schemas.wire.strict_json import canonical, decode
from schemas.wire.verdicts import ACCEPTED, REJECTED, UNKNOWN_RECIPIENT

UNDELIVERABLE: Final = "undeliverable"
NEEDS_PERMISSION: Final = f"job.{PERMISSION_REQUIRED}"
_PERMISSION: Final = PERMISSION_REQUIRED.encode()


def hangs_on_verdict(record: Record, row: Rows) -> bool:
    """Whether something may follow from `record` that hangs on how it was settled. Most often not."""
    stream, envelope = _read(record)
    if stream is None or envelope is None:
        return False
    kind, name = stream
    if kind == JOB and envelope.type == JOB_EVENT:
        return record.value is not None and _PERMISSION in record.value and _wants(row, name) is not None
    if envelope.door != MQTT:
        return False
    return (kind, envelope.type) in ((AGENT, AGENT_SAID), (MAILBOX, MESSAGE_POSTED))


def follow_ups_of_verdict(record: Record, verdict: str, reason: str | None, row: Rows) -> list[OutgoingRecord]:
    """What follows from `record`, which was settled so."""
    stream, envelope = _read(record)
    if stream is None or envelope is None or not hangs_on_verdict(record, row):
        return []
    if envelope.type == AGENT_SAID:
        return _posted(record, envelope, stream[1], row) if verdict == ACCEPTED else []
    if envelope.type == MESSAGE_POSTED:
        if verdict != REJECTED:
            return []
        recipient, cause = stream[1].partition("/")[2], f"{stream[1]}/{envelope.ce_id}"
        return [_undeliverable(envelope.principal, envelope.ce_id, recipient, reason or REJECTED, cause)]
    return _needs_permission(record, envelope, stream[1], row) if verdict == ACCEPTED else []


def _read(record: Record) -> tuple[tuple[str, str] | None, Envelope | None]:
    try:
        return parse_stream_key(record.key), read_envelope(record)
    except BadEnvelopeError:
        return None, None


def _wants(row: Rows, job_id: str) -> JobRow | None:
    """The job, if who registered it wants to hear when it needs permission."""
    job = row(REGISTRY_JOBS, job_id)
    return job if isinstance(job, JobRow) and job.notify is not None and PERMISSION in job.notify else None


def _needs_permission(record: Record, envelope: Envelope, job_id: str, row: Rows) -> list[OutgoingRecord]:
    job, event = _wants(row, job_id), decode(record.value or b"")[0]
    if job is None or event["event"] != PERMISSION_REQUIRED:
        return []
    recipient = job.registered_by.partition("/")[2]
    if not is_name(recipient):
        return []
    masked, _ = mask_event(event)
    body = {"job_id": job_id, "seq": event["seq"], "detail": event["detail"] if masked is None else MASK}
    return [_word_of_ours(recipient, NEEDS_PERMISSION, body, follow_up_id(envelope.ce_id, NEEDS_PERMISSION))]


def _posted(record: Record, envelope: Envelope, agent: str, row: Rows) -> list[OutgoingRecord]:
    """The agent's message; one whose recipient nobody knows is told back."""
    said: dict[str, Any] = decode(record.value or b"")[0]
    refusal = _undeliverable(agent, said["message_id"], said["to"], UNKNOWN_RECIPIENT, envelope.ce_id)
    if not _is_to_deliver(agent, said, refusal.ce_id, row):
        return [refusal]
    text, content_type = body_text(said["body"])
    message = Message.model_validate(
        {
            "message_id": said["message_id"],
            "from": agent,
            "from_verified": True,
            "to": said["to"],
            "kind": said["kind"],
            "priority": said.get("priority", "normal"),
            "body": text,
            "content_type": content_type,
            "in_reply_to": said.get("in_reply_to"),
            "thread": said.get("thread"),
        }
    )
    return [posting_record(message, door=MQTT, principal=agent)]


def _is_to_deliver(agent: str, said: dict[str, Any], refusal_id: str, row: Rows) -> bool:
    """Whether the recipient is known; what was decided before, as far as the mailboxes tell, stays so."""
    if row(MAILBOX_VIEW, f"{DEFAULT_REALM}/{agent}/{refusal_id}") is not None:
        return False
    if row(MAILBOX_VIEW, f"{DEFAULT_REALM}/{said['to']}/{said['message_id']}") is not None:
        return True
    return has_mailbox(row, said["to"])


def _undeliverable(agent: str, message_id: str, recipient: str, reason: str, cause: str) -> OutgoingRecord:
    body = {"message_id": message_id, "to": recipient, "reason": reason}
    return _word_of_ours(agent, UNDELIVERABLE, body, follow_up_id(cause, UNDELIVERABLE), message_id)


def _word_of_ours(
    recipient: str, kind: str, body: dict[str, Any], message_id: str, in_reply_to: str | None = None
) -> OutgoingRecord:
    message = Message.model_validate(
        {
            "message_id": message_id,
            "from": SENDER,
            "from_verified": True,
            "to": recipient,
            "kind": kind,
            "body": canonical(body).decode("utf-8"),
            "in_reply_to": in_reply_to,
        }
    )
    return posting_record(message, door=DOOR, principal=REACTOR)
