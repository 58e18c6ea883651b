"""The fold: the pure function that decides the verdict on a record and its effect on its stream.

`settle` checks a record in this order: `unauthenticated_record`, `too_large`, `malformed`, `schema_version`,
`malformed` again, then the rules of the stream's kind. The fold reads no clock, no file and no network. Its
only time is the time at which Kafka appended the record, so Spark and the gateway always get the same result.

`KINDS` has all kinds of streams; record types and views are derived from it. To add a kind, add a package in
this folder and an entry in `KINDS`.
"""

from __future__ import annotations

from typing import Any, Final

from schemas.fold.entries import Entries, EntriesUnreadable
from schemas.fold.settled import Outcome, Settled, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.fold.view_rows import Row
from schemas.keys.record_macs import FILE_BRIDGE, GATEWAY, MQTT_BRIDGE, SIGNED_BY_AUTHOR, is_mac_of
from schemas.keys.sealing import Keyring, MissingKeyError
from schemas.streams.agents.agent_fold import AGENT_KIND
from schemas.streams.blob.blobs import BLOB_KIND
from schemas.streams.container.containers import CONTAINER_KIND
from schemas.streams.control.control_fold import CONTROL_KIND
from schemas.streams.control.record_macs import MAC_MODELS, rules_of
from schemas.streams.job.job_fold import JOB_KIND
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_CLAIMED
from schemas.streams.mailboxes.mailbox_fold import MAILBOX_KIND
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.principal.principals import PRINCIPAL_KIND
from schemas.streams.refused.refusal import REFUSED_KIND, REQUEST_REFUSED
from schemas.streams.schedule.schedule_fold import SCHEDULE_KIND
from schemas.streams.session.sessions import SESSION_KIND
from schemas.streams.task.task_fold import TASK_KIND
from schemas.streams.thread.threads import THREAD_KIND
from schemas.streams.topic.topic_fold import TOPIC_KIND
from schemas.streams.webhook.webhooks import WEBHOOK_KIND
from schemas.wire.record import (
    VALUE_LIMIT_BYTES,
    BadEnvelopeError,
    Envelope,
    Record,
    partition_for,
    read_envelope,
    record_mac_input,
)
from schemas.wire.wire_body import body_fault
from trunkline_agent.wire.ids import REFUSED, parse_stream_key
from trunkline_agent.wire.job_event import SCHEMA_VERSION as EVENT_VERSION
from trunkline_agent.wire.moments import is_utc_timestamp
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.unsafe_text import mask_event, mask_opaque
from trunkline_agent.wire.verdicts import (
    ACCEPTED,
    FOLD_FAILED,
    MALFORMED,
    REJECTED,
    SCHEMA_VERSION,
    TOO_LARGE,
    UNAUTHENTICATED_RECORD,
    UNKNOWN_STREAM,
)

# In the order in which a micro-batch writes their views.
KINDS: Final[dict[str, StreamKind]] = {
    kind.name: kind
    for kind in (
        JOB_KIND,
        SESSION_KIND,
        PRINCIPAL_KIND,
        TASK_KIND,
        AGENT_KIND,
        CONTAINER_KIND,
        CONTROL_KIND,
        THREAD_KIND,
        TOPIC_KIND,
        SCHEDULE_KIND,
        BLOB_KIND,
        WEBHOOK_KIND,
        MAILBOX_KIND,
        REFUSED_KIND,
    )
}
RECORD_TYPES: Final = tuple(record_type for kind in KINDS.values() for record_type in kind.models)

STREAM_ENTRIES: Final = "stream_entries"
# In the order in which a micro-batch writes them. `stream_entries` is written last and records the progress.
VIEWS: Final[dict[str, type[Row]]] = {
    row_type.VIEW: row_type
    for row_types in (
        *(kind.rows for kind in KINDS.values()),
        *(kind.later_rows for kind in KINDS.values()),
    )
    for row_type in row_types
}
VIEW_TABLES: Final = (*VIEWS, STREAM_ENTRIES)


# The doors and record types for which a signer's key counts. The processes that have the gateway's key have the
# master keys, too, so a limit would not bind them.
_LIMITS: Final = {
    MQTT_BRIDGE: frozenset({("mqtt", MESSAGE_CLAIMED), ("mqtt", REQUEST_REFUSED)}),
    FILE_BRIDGE: frozenset({("file", MESSAGE_POSTED), ("file", MESSAGE_CLAIMED)}),
}


def authentication_fault(
    record: Record, envelope: Envelope, is_of_stream: bool, macs: Entries, keyring: Keyring
) -> Outcome | None:
    """Check by its MAC that a process of this installation appended a record, and that its partition is right.

    Args:
        record: the record.
        envelope: its headers.
        is_of_stream: whether its key is that of a stream.
        macs: the state of the stream `macs_stream(record.partition)`. Without rules, only the records that set
            them need a MAC.
        keyring: the master keys.

    Returns:
        The rejection, or `None` if there is no fault.

    Raises:
        MissingKeyError: the MAC is under a master key that this process lacks.
    """
    rules = rules_of(macs)
    if envelope.type not in SIGNED_BY_AUTHOR and (rules is not None or envelope.type in MAC_MODELS):
        why = _mac_fault(record, envelope, () if rules is None else rules.ended, keyring)
        if why is not None:
            return rejected(UNAUTHENTICATED_RECORD, why)
    if rules is None or not is_of_stream or record.key is None or envelope.type in MAC_MODELS:
        return None
    # A copy in another partition would be a second stream of the same name.
    if partition_for(record.key, rules.partitions) != record.partition:
        return rejected(UNAUTHENTICATED_RECORD, "the stream belongs to another partition")
    return None


def has_valid_mac(record: Record, envelope: Envelope, keyring: Keyring) -> bool:
    """Return whether a record has a valid MAC under one of the master keys, ended or not."""
    try:
        return _mac_fault(record, envelope, (), keyring) is None
    except MissingKeyError:
        return False


def _mac_fault(record: Record, envelope: Envelope, ended: tuple[str, ...], keyring: Keyring) -> str | None:
    if envelope.mac is None or envelope.mac_key is None:
        return "the record has no MAC"
    key = keyring.known_mac_key(envelope.mac_key, ended)
    if key is None:
        return "the MAC is under an unknown key"
    if key.master in ended:
        return "the MAC is under a key that has ended"
    if key.signer != GATEWAY and (envelope.door, envelope.type) not in _LIMITS.get(key.signer, ()):
        return "the key of the MAC is not for this door and type"
    if not is_mac_of(key, record_mac_input(record), envelope.mac):
        return "the MAC does not belong to the content"
    return None


# A record without a valid key belongs to no stream. It is shown as if it belonged to this one.
UNKEYED: Final = (REFUSED, "kafka")
# Used for each kind that is not in `KINDS`.
_UNKNOWN_KIND: Final = StreamKind(
    name="",
    models={},
    settle=lambda _: rejected(UNKNOWN_STREAM, "no such kind of stream"),
    row_of_each_stream=(),
    checks_bodies=True,
)


def settle(
    record: Record, entries: Entries, keyring: Keyring, macs: Entries, *, in_run: bool = False
) -> Settled:
    """Decide the verdict on one record and update the state of its stream.

    A runner calls it once for each record, in the order of offsets. An error in the fold's own code becomes a
    rejection with the reason `fold_failed`.

    Args:
        record: the record to settle, as it was read from Kafka.
        entries: the state of the record's stream. It is changed only if the record is accepted. The caller
            stores the changes, which `entries.take_writes` returns.
        keyring: the master keys that open the sealed secrets of jobs and agents, and check MACs.
        macs: the state of the stream `macs_stream(record.partition)`, which says whether records need a MAC. It
            is the same object as `entries` for a record of that stream.
        in_run: leave two things to the caller, who then settles many records in less time: the rows of
            `Settled.rows`, which are needed for the stream's last accepted record alone, and the encoding of
            changed entries. After a record with the reason `fold_failed`, the caller must settle the records
            since `entries.take_writes` again, because the fold may have changed structs before it failed.

    Returns:
        The verdict, its reason, and the rows of views that the record changes. The caller writes the rows.

    Raises:
        EntriesUnreadable: the store of the entries is damaged.
        MissingKeyError: the record's MAC is under a master key that this process lacks. The caller must stop
            before this record, because another process can decide on it.
    """
    try:
        settled = _settle(record, entries, keyring, macs, in_run)
    except (EntriesUnreadable, MissingKeyError):
        entries.drop()
        raise
    except Exception as error:  # noqa: BLE001  a bug must affect one record, not its stream
        kind, name = parse_stream_key(record.key) or UNKEYED
        masked, shown = mask_opaque(record.value)
        settled = Settled(REJECTED, kind, name, FOLD_FAILED, type(error).__name__, masked=masked, shown=shown)
    if settled.verdict == ACCEPTED:
        entries.keep()
        if not in_run:
            entries.encode()
    else:
        entries.drop()
    return settled


def _settle(record: Record, entries: Entries, keyring: Keyring, macs: Entries, in_run: bool) -> Settled:
    stream = parse_stream_key(record.key)
    kind, name = stream or UNKEYED
    value = record.value
    try:
        envelope = read_envelope(record)
    except BadEnvelopeError as error:
        reason = TOO_LARGE if value is not None and len(value) > VALUE_LIMIT_BYTES else MALFORMED
        return _opaque(record, kind, name, None, rejected(reason, str(error)))
    fault = authentication_fault(record, envelope, stream is not None, macs, keyring)
    if fault is not None:
        return _opaque(record, kind, name, envelope, fault)
    if value is not None and (envelope.body_bytes is not None or len(value) > VALUE_LIMIT_BYTES):
        size = envelope.body_bytes or len(value)
        return _opaque(record, kind, name, envelope, rejected(TOO_LARGE, f"a body of {size} bytes"))
    try:
        body, plain = _body_of(value, stream, envelope)
    except MalformedJsonError as error:
        return _opaque(record, kind, name, envelope, rejected(MALFORMED, str(error)))
    masked, shown = mask_event(body)
    stream_kind = KINDS.get(kind, _UNKNOWN_KIND)
    outcome = _body_fault(stream_kind, name, envelope.type, body)
    if outcome is None:
        is_masked = masked is not None
        outcome = stream_kind.settle(
            FoldInput(record, envelope, name, body, entries, keyring, plain, is_masked)
        )
    seq, sent_at = body.get("seq"), body.get("timestamp")
    # If the record is not rejected, its model has already checked the time.
    is_time = type(sent_at) is str and (outcome.verdict != REJECTED or is_utc_timestamp(sent_at))
    return Settled(
        outcome.verdict,
        kind,
        name,
        outcome.reason,
        outcome.why,
        outcome.late,
        outcome.changes if outcome.rows is None or in_run else outcome.rows(),
        outcome.status_after,
        seq if type(seq) is int else None,
        sent_at if is_time else None,
        masked,
        shown,
        envelope,
        outcome.rows if in_run else None,
    )


def _body_of(
    value: bytes | None, stream: tuple[str, str] | None, envelope: Envelope
) -> tuple[dict[str, Any], bool]:
    """Return the decoded body, and whether it is plain. Raises MalformedJsonError if the record has none."""
    if stream is None:
        raise MalformedJsonError("the key is no stream's")
    if value is None:
        raise MalformedJsonError("no value")
    if stream[0] == REFUSED and envelope.type != REQUEST_REFUSED:
        raise MalformedJsonError("the door could not tell which stream it belongs to")
    body, plain = decode(value)
    if type(body) is not dict:
        raise MalformedJsonError("not an object")
    return body, plain


def _body_fault(kind: StreamKind, name: str, record_type: str, body: dict[str, Any]) -> Outcome | None:
    is_foreign = record_type in kind.foreign_types
    version = body.get("schema_version", EVENT_VERSION if is_foreign else None)
    if type(version) is not int:
        return rejected(MALFORMED, "schema_version: expected an integer")
    named_by = kind.named_by
    if named_by is not None and not is_foreign:
        named = body.get(named_by) if isinstance(named_by, str) else named_by(body)
        if named != name:
            return rejected(MALFORMED, kind.misnamed)
    if version != EVENT_VERSION:
        return rejected(SCHEMA_VERSION, f"schema_version: this backbone reads {EVENT_VERSION}")
    if kind.checks_bodies:
        return None
    fast_check = kind.fast_checks.get(record_type)
    if fast_check is not None:
        fault = fast_check(body)
    else:
        model = kind.models.get(record_type)
        if model is None:
            return rejected(MALFORMED, f"ce_type: no type of a {kind.name} stream")
        fault = body_fault(model, body)
    return None if fault is None else rejected(MALFORMED, fault)


def _opaque(record: Record, kind: str, name: str, envelope: Envelope | None, outcome: Outcome) -> Settled:
    masked, shown = mask_opaque(record.value)
    return Settled(
        outcome.verdict, kind, name, outcome.reason, outcome.why, masked=masked, shown=shown, envelope=envelope
    )
