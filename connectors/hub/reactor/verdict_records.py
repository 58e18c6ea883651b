"""Derived records that depend on the verdict: deliveries of MQTT messages (JE-26), and notifications.

A message that an agent sent over MQTT is posted to its recipient, or the agent is notified of the reason. The
messages that an agent confirms over MQTT are claimed. The principal that registered a job is notified when the
job needs permission. The functions use only the settled record, its verdict and the rows of the live view, so
the result is the same at every gateway.
"""

from __future__ import annotations

from typing import Any, Final

from connectors.hub.reactor.derived_records import derived_id, message_from_hub, notifications
from connectors.hub.reactor.known_recipients import GetRow, has_mailbox
from connectors.hub.reactor.limits_of_principals import limits_of
from connectors.plumbing.mqtt_link.payloads import MQTT_DOOR
from schemas.streams.agents.mqtt_agents import AGENT_CONFIRMED, AGENT_SAID, body_text
from schemas.streams.job.job_registry import JOB_EVENT, PERMISSION, JobRow
from schemas.streams.mailboxes.mailbox_bodies import LIMIT_MOST, MailboxClaim
from schemas.streams.mailboxes.message import (
    DEFAULT_REALM,
    MESSAGE_POSTED,
    MessageRow,
    milliseconds_of,
    verified_message,
)
from schemas.wire.record import BadEnvelopeError, Envelope, OutgoingRecord, Record, read_envelope
from trunkline_agent.wire.agent_message import MESSAGE_FIELDS
from trunkline_agent.wire.ids import AGENT, JOB, MAILBOX, parse_stream_key
from trunkline_agent.wire.job_event import PERMISSION_REQUIRED
from trunkline_agent.wire.masking import MASK, mask_event
from trunkline_agent.wire.strict_json import decode
from trunkline_agent.wire.verdicts import ACCEPTED, MAILBOX_FULL, REJECTED, UNKNOWN_RECIPIENT

UNDELIVERABLE: Final = "undeliverable"
NEEDS_PERMISSION: Final = f"job.{PERMISSION_REQUIRED}"
_PERMISSION: Final = PERMISSION_REQUIRED.encode()
_MINUTE_US: Final = 60_000_000
_OF_AGENTS: Final = frozenset({(AGENT, AGENT_SAID), (AGENT, AGENT_CONFIRMED), (MAILBOX, MESSAGE_POSTED)})
# The fields that an agent's message has in the mailbox, too.
_AS_SAID: Final = (*(one.name for one in MESSAGE_FIELDS), "priority")


def depends_on_verdict(record: Record, get: GetRow) -> bool:
    """Return whether `records_by_verdict` may return a record for `record`, so that its verdict is needed.

    This spares the reactor the look-up of most verdicts. `get` is the look-up of rows, such as `LiveView.get`.
    True for four types of record:

    - an agent's outbox message over MQTT, which may have to be delivered
    - an agent's confirmation over MQTT of messages that it has received
    - a message posted over MQTT, whose rejection its sender must learn
    - an event that may ask for permission, if the job's registration asks for a message about that
    """
    stream, envelope = _read(record)
    if stream is None or envelope is None:
        return False
    kind, name = stream
    if kind == JOB and envelope.type == JOB_EVENT:
        mentions_permission = record.value is not None and _PERMISSION in record.value
        return mentions_permission and _job_to_notify(get, name) is not None
    if envelope.door != MQTT_DOOR:
        return False
    return (kind, envelope.type) in _OF_AGENTS


def records_by_verdict(record: Record, verdict: str, reason: str | None, get: GetRow) -> list[OutgoingRecord]:
    """Return the records that the reactor has to append because `record` was settled with `verdict`.

    Usually the list is empty. The records post messages. An agent's MQTT message goes to its recipient. If that
    is impossible, a notice goes to the agent. If a job needs permission, a notice goes to its delegator. For
    an agent's confirmation, the record claims the confirmed messages.

    Args:
        record: The settled record.
        verdict: Its verdict: accepted, duplicate or rejected.
        reason: The reason of a rejection; None for another verdict.
        get: The look-up of rows, such as `LiveView.get`. The rows must include the effect of `record`.
    """
    stream, envelope = _read(record)
    if stream is None or envelope is None or not depends_on_verdict(record, get):
        return []
    if envelope.type == MESSAGE_POSTED:
        if verdict != REJECTED:
            return []
        recipient, cause = stream[1].partition("/")[2], f"{stream[1]}/{envelope.ce_id}"
        if reason == MAILBOX_FULL:
            # The sender has a receipt with the reason, unless that was too late. See FewNotices.
            cause = f"{stream[1]}/{envelope.principal}/{reason}/{record.logged_at_us // _MINUTE_US}"
        return [_undeliverable(envelope.principal, envelope.ce_id, recipient, reason or REJECTED, cause)]
    if verdict != ACCEPTED:
        return []
    if envelope.type == AGENT_SAID:
        return [_delivery(record, envelope, stream[1], get)]
    if envelope.type == AGENT_CONFIRMED:
        return [_claim(record, envelope, stream[1])]
    return _permission_notice(record, envelope, stream[1], get)


def _read(record: Record) -> tuple[tuple[str, str] | None, Envelope | None]:
    try:
        return parse_stream_key(record.key), read_envelope(record)
    except BadEnvelopeError:
        return None, None


def _job_to_notify(get: GetRow, job_id: str) -> JobRow | None:
    """Return the job if its registration asks for a message when it needs permission."""
    job = get(JobRow, job_id)
    return job if job is not None and job.notify is not None and PERMISSION in job.notify else None


def _permission_notice(record: Record, envelope: Envelope, job_id: str, get: GetRow) -> list[OutgoingRecord]:
    job, event = _job_to_notify(get, job_id), decode(record.value or b"")[0]
    if job is None or event["event"] != PERMISSION_REQUIRED:
        return []
    masked, _ = mask_event(event)
    body = {"job_id": job_id, "seq": event["seq"], "detail": event["detail"] if masked is None else MASK}
    return notifications(job, NEEDS_PERMISSION, body, derived_id(envelope.ce_id, NEEDS_PERMISSION))


def _delivery(record: Record, envelope: Envelope, agent: str, get: GetRow) -> OutgoingRecord:
    """Return the posting of the agent's message, or a message to the agent if the recipient is unknown."""
    said: dict[str, Any] = decode(record.value or b"")[0]
    refusal = _undeliverable(agent, said["message_id"], said["to"], UNKNOWN_RECIPIENT, envelope.ce_id)
    if not _is_deliverable(agent, said, refusal.ce_id, get):
        return refusal
    others: dict[str, Any] = {name: said[name] for name in _AS_SAID if name in said}
    others |= {
        "expires_in_ms": milliseconds_of(said.get("expires_in_s")),
        "deliver_after_ms": milliseconds_of(said.get("deliver_after_s")),
        **limits_of(get, said["to"]).of_mailbox,
    }
    message = verified_message(
        said["message_id"], agent, said["to"], said["kind"], *body_text(said["body"]), **others
    )
    return message.record(door=MQTT_DOOR, principal=agent)


def _claim(record: Record, envelope: Envelope, agent: str) -> OutgoingRecord:
    """Return the claim of the messages that an agent has confirmed, under the id of the confirmation."""
    ids: list[str] = decode(record.value or b"")[0]["confirms"]
    # By its position: the same ids may be of new messages after a week, and the same bytes confirm them.
    request = f"{record.partition}-{record.offset}"
    return MailboxClaim(to=agent, request_id=request, message_ids=list(ids), limit=LIMIT_MOST).record(
        ce_id=envelope.ce_id, door=MQTT_DOOR, principal=agent
    )


def _is_deliverable(agent: str, said: dict[str, Any], refusal_id: str, get: GetRow) -> bool:
    """Return whether the recipient is known; an earlier decision that the mailboxes show stays valid."""
    if get(MessageRow, f"{DEFAULT_REALM}/{agent}/{refusal_id}") is not None:
        return False
    if get(MessageRow, f"{DEFAULT_REALM}/{said['to']}/{said['message_id']}") is not None:
        return True
    return has_mailbox(get, said["to"])


def _undeliverable(agent: str, message_id: str, recipient: str, reason: str, cause: str) -> OutgoingRecord:
    body = {"message_id": message_id, "to": recipient, "reason": reason}
    return message_from_hub(agent, UNDELIVERABLE, body, derived_id(cause, UNDELIVERABLE), message_id)
