"""The fold: what one record does to its stream. Pure, never raising, the same on every runner.

`settle` runs the checks in the order of the design: `too_large`, `malformed`, `schema_version`, `malformed`
again, then the stream's own rules. It knows no clock, no file and no network: time is the record's.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from pydantic import BaseModel

from schemas.fold.entries import Entries
from schemas.fold.settled import Outcome, Settled, rejected
from schemas.keys.sealing import Keyring
from schemas.streams.agents.agent_fold import settle_agent
from schemas.streams.agents.agent_registry import AGENT_MODELS
from schemas.streams.agents.mqtt_agent_fold import settle_mqtt_agent
from schemas.streams.agents.mqtt_agents import MQTT_AGENT_MODELS
from schemas.streams.agents.participant_fold import settle_participant
from schemas.streams.agents.participants import PARTICIPANT_MODELS
from schemas.streams.container.container_fold import settle_container
from schemas.streams.container.container_registry import CONTAINER_MODELS
from schemas.streams.control.control_fold import settle_control
from schemas.streams.job.job_event import event_fault
from schemas.streams.job.job_fold import settle_job
from schemas.streams.job.job_registry import JobCancellation, JobPick, JobRegistration, JobSecretRotation
from schemas.streams.mailboxes.mailbox_fold import settle_mailbox
from schemas.streams.mailboxes.mailbox_requests import MAILBOX_MODELS
from schemas.streams.mailboxes.threads import ThreadOpened, settle_thread
from schemas.streams.principal.principal_fold import settle_principal
from schemas.streams.principal.principals import PrincipalAddition, PrincipalRevocation
from schemas.streams.session.session_fold import settle_session
from schemas.streams.session.session_registry import SESSION_MODELS
from schemas.streams.task.task_fold import settle_task
from schemas.streams.task.task_registry import TASK_MODELS
from schemas.wire.field_checks import SCHEMA_VERSION as EVENT_VERSION
from schemas.wire.field_checks import is_utc_timestamp
from schemas.wire.ids import (
    AGENT,
    CONTAINER,
    CONTROL,
    JOB,
    MAILBOX,
    PRINCIPAL,
    REFUSED,
    SESSION,
    TASK,
    THREAD,
    parse_stream_key,
)
from schemas.wire.masking import mask_event, mask_opaque
from schemas.wire.message import DEFAULT_REALM
from schemas.wire.record import (
    AGENT_SAID,
    JOB_CANCELLED,
    JOB_EVENT,
    JOB_PICKED,
    JOB_REGISTERED,
    JOB_SECRET_ROTATED,
    PRINCIPAL_ADDED,
    PRINCIPAL_REVOKED,
    REQUEST_REFUSED,
    THREAD_OPENED,
    VALUE_LIMIT_BYTES,
    BadEnvelopeError,
    Envelope,
    Record,
    read_envelope,
)
from schemas.wire.refusal import Refusal
from schemas.wire.strict_json import MalformedJsonError, decode
from schemas.wire.verdicts import (
    ACCEPTED,
    FOLD_FAILED,
    MALFORMED,
    REJECTED,
    SCHEMA_VERSION,
    TOO_LARGE,
    UNKNOWN_STREAM,
)
from schemas.wire.wire_body import body_fault

# A record without a usable key belongs to no stream; it is shown under this one.
UNKEYED: Final = (REFUSED, "kafka")
# The bodies that each kind of stream takes, by record type. A job's events have a check of their own, and a
# control stream looks at its bodies itself.
_MODELS: Final[dict[str, dict[str, type[BaseModel]]]] = {
    JOB: {
        JOB_REGISTERED: JobRegistration,
        JOB_PICKED: JobPick,
        JOB_CANCELLED: JobCancellation,
        JOB_SECRET_ROTATED: JobSecretRotation,
    },
    SESSION: dict(SESSION_MODELS),
    MAILBOX: dict(MAILBOX_MODELS),
    TASK: dict(TASK_MODELS),
    AGENT: {**AGENT_MODELS, **PARTICIPANT_MODELS, **MQTT_AGENT_MODELS},
    CONTAINER: dict(CONTAINER_MODELS),
    PRINCIPAL: {PRINCIPAL_ADDED: PrincipalAddition, PRINCIPAL_REVOKED: PrincipalRevocation},
    REFUSED: {REQUEST_REFUSED: Refusal},
    THREAD: {THREAD_OPENED: ThreadOpened},
}

# The field of a body that must be the stream's name.
_NAMED_BY: Final = {
    SESSION: "session",
    PRINCIPAL: "principal",
    TASK: "task_id",
    AGENT: "agent_name",
    CONTAINER: "container",
    THREAD: "thread",
}


def settle(record: Record, entries: Entries, keyring: Keyring) -> Settled:
    """What `record` does to its stream, whose past is in `entries`.

    Changes of entries are kept for an accepted record and dropped for any other. Never raises: what the
    fold's own code cannot handle is `fold_failed`.
    """
    try:
        settled = _settle(record, entries, keyring)
    except Exception as error:  # noqa: BLE001  a bug must cost one record, not the stream
        kind, name = parse_stream_key(record.key) or UNKEYED
        masked, shown = mask_opaque(record.value)
        settled = Settled(REJECTED, kind, name, FOLD_FAILED, type(error).__name__, masked=masked, shown=shown)
    if settled.verdict == ACCEPTED:
        entries.keep()
    else:
        entries.drop()
    return settled


def _settle(record: Record, entries: Entries, keyring: Keyring) -> Settled:
    stream = parse_stream_key(record.key)
    kind, name = stream or UNKEYED
    value = record.value
    try:
        envelope = read_envelope(record)
    except BadEnvelopeError as error:
        reason = TOO_LARGE if value is not None and len(value) > VALUE_LIMIT_BYTES else MALFORMED
        return _opaque(record, kind, name, None, rejected(reason, str(error)))
    if value is not None and (envelope.body_bytes is not None or len(value) > VALUE_LIMIT_BYTES):
        size = envelope.body_bytes or len(value)
        return _opaque(record, kind, name, envelope, rejected(TOO_LARGE, f"a body of {size} bytes"))
    if stream is None:
        return _opaque(record, kind, name, envelope, rejected(MALFORMED, "the key is no stream's"))
    if value is None:
        return _opaque(record, kind, name, envelope, rejected(MALFORMED, "no value"))
    if kind == REFUSED and envelope.type != REQUEST_REFUSED:
        why = "the door could not tell which stream it belongs to"
        return _opaque(record, kind, name, envelope, rejected(MALFORMED, why))
    try:
        body, plain = decode(value)
    except MalformedJsonError as error:
        return _opaque(record, kind, name, envelope, rejected(MALFORMED, str(error)))
    if type(body) is not dict:
        return _opaque(record, kind, name, envelope, rejected(MALFORMED, "not an object"))
    return _settle_body(record, kind, name, envelope, body, plain, entries, keyring)


def _settle_body(
    record: Record,
    kind: str,
    name: str,
    envelope: Envelope,
    body: dict[str, Any],
    plain: bool,
    entries: Entries,
    keyring: Keyring,
) -> Settled:
    masked, shown = mask_event(body)
    outcome = _body_fault(kind, name, envelope.type, body)
    if outcome is None:
        if kind == JOB:
            is_masked = masked is not None
            outcome = settle_job(record, envelope, name, body, plain, is_masked, entries, keyring)
        elif kind == AGENT and envelope.type in MQTT_AGENT_MODELS:
            outcome = settle_mqtt_agent(record, envelope, name, body, entries, keyring)
        else:
            outcome = _settle_other(record, kind, name, envelope, body, entries)
    seq, sent_at = body.get("seq"), body.get("timestamp")
    # What is not rejected passed its wire model, which checked the time.
    is_time = type(sent_at) is str and (outcome.verdict != REJECTED or is_utc_timestamp(sent_at))
    return Settled(
        outcome.verdict,
        kind,
        name,
        outcome.reason,
        outcome.why,
        outcome.late,
        outcome.changes,
        outcome.status_after,
        seq if type(seq) is int else None,
        sent_at if is_time else None,
        masked,
        shown,
        envelope,
    )


def _settle_other(
    record: Record, kind: str, name: str, envelope: Envelope, body: dict[str, Any], entries: Entries
) -> Outcome:
    if kind == SESSION:
        return settle_session(record, envelope, name, body, entries)
    if kind == MAILBOX:
        return settle_mailbox(record, envelope, name, body, entries)
    if kind == TASK:
        return settle_task(record, envelope, name, body, entries)
    if kind == AGENT and envelope.type in PARTICIPANT_MODELS:
        return settle_participant(record, envelope, name, body, entries)
    if kind == AGENT:
        return settle_agent(record, envelope, name, body, entries)
    if kind == CONTAINER:
        return settle_container(record, envelope, name, body, entries)
    if kind == PRINCIPAL:
        return settle_principal(record, envelope, name, body, entries)
    if kind == REFUSED:
        return rejected(body["reason"], body["why"])
    if kind == THREAD:
        return settle_thread(record, name, body, entries)
    if kind == CONTROL:
        return settle_control(record, name, envelope, body, entries)
    return rejected(UNKNOWN_STREAM, "no such kind of stream")


def _body_fault(kind: str, name: str, record_type: str, body: dict[str, Any]) -> Outcome | None:
    # An agent's own payload names neither its version nor its agent, whose topic and signature do.
    is_said = kind == AGENT and record_type == AGENT_SAID
    version = body.get("schema_version", EVENT_VERSION if is_said else None)
    if type(version) is not int:
        return rejected(MALFORMED, "schema_version: expected an integer")
    if kind == JOB:
        if body.get("job_id") != name:
            return rejected(MALFORMED, "job_id: not the one of its topic")
    elif not is_said and not _is_of_stream(kind, name, body):
        return rejected(MALFORMED, "the body names another stream than the key")
    if version != EVENT_VERSION:
        return rejected(SCHEMA_VERSION, f"schema_version: this backbone reads {EVENT_VERSION}")
    if record_type == JOB_EVENT and kind == JOB:
        fault = event_fault(body)
        return None if fault is None else rejected(MALFORMED, fault)
    models = _MODELS.get(kind)
    if models is None:
        return None
    model = models.get(record_type)
    if model is None:
        return rejected(MALFORMED, f"ce_type: no type of a {kind} stream")
    fault = body_fault(model, body)
    return None if fault is None else rejected(MALFORMED, fault)


def _is_of_stream(kind: str, name: str, body: dict[str, Any]) -> bool:
    if kind == MAILBOX:
        realm, agent = body.get("realm", DEFAULT_REALM), body.get("to")
        return type(realm) is str and type(agent) is str and f"{realm}/{agent}" == name
    field = _NAMED_BY.get(kind)
    return field is None or body.get(field) == name


def _opaque(record: Record, kind: str, name: str, envelope: Envelope | None, outcome: Outcome) -> Settled:
    masked, shown = mask_opaque(record.value)
    settled = Settled(outcome.verdict, kind, name, outcome.reason, outcome.why, masked=masked, shown=shown)
    return settled if envelope is None else msgspec.structs.replace(settled, envelope=envelope)
