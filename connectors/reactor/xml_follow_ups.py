"""What follows from a settled record of the XML pump: answers are posted, threads opened, mailboxes closed.

Told from the record, its verdict and the rows alone, as those of `follow_ups`. The gateway that has just
settled an acknowledgement posts its answers itself, at once; here is what a killed one did not post, under the
same ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

from pydantic import ValidationError

from connectors.xml_payloads.huh import HUH_TAG, huh
from schemas.fold.view_rows import (
    MAILBOX_VIEW,
    REGISTRY_LISTENERS,
    REGISTRY_THREADS,
    ListenerRow,
    MessageRow,
    Row,
)
from schemas.streams.control.organism import ORGANISM, ORGANISM_MODELS
from schemas.streams.mailboxes.mailbox_fold import CLOSED
from schemas.streams.mailboxes.mailbox_requests import MessageAck, gate_record, read_record
from schemas.streams.mailboxes.threads import ThreadOpened, thread_record
from schemas.streams.principal.principals import ACTIVE, REACTOR, SYSTEM
from schemas.wire.ids import CONTROL, MAILBOX, parse_stream_key
from schemas.wire.message import DEAD, DEFAULT_REALM, MESSAGE_PENDING, Message, posting_record
from schemas.wire.record import (
    MESSAGE_ACKED,
    MESSAGE_NACKED,
    MESSAGE_POSTED,
    MESSAGE_RECLAIMED,
    THREAD_OPENED,
    BadEnvelopeError,
    Envelope,
    OutgoingRecord,
    Record,
    read_envelope,
)
from schemas.wire.strict_json import MalformedJsonError, decode
from schemas.wire.verdicts import ACCEPTED, REJECTED

XML_DOOR: Final = "xml"
XML_CONTENT: Final = "application/xml"
_DOOR: Final = "reactor"
_NAMESPACE: Final = uuid.UUID("0d4b6c52-5d3e-5b1e-8f36-1f5a9e2c7a40")
_ENDED: Final = frozenset({MESSAGE_RECLAIMED, MESSAGE_NACKED})
_MAILBOX_TYPES: Final = frozenset({MESSAGE_ACKED, MESSAGE_POSTED, *_ENDED})

RowOf = Callable[[str, str], Row | None]
Rows = Callable[[str], list[Row]]


def xml_follow_ups(
    record: Record, verdict: str, why: str | None, row: RowOf, rows: Rows
) -> list[OutgoingRecord]:
    """What follows from `record`, which was settled so; most often nothing."""
    is_closed = verdict == REJECTED and why == CLOSED
    if not (verdict == ACCEPTED or is_closed) or not may_lead_to_more(record):
        return []
    stream = parse_stream_key(record.key)
    try:
        envelope = read_envelope(record)
        body = decode(record.value or b"")[0]
    except (BadEnvelopeError, MalformedJsonError):
        return []
    if stream is None:
        return []
    if is_closed:
        return _came_too_late(envelope, body)
    if stream[0] == CONTROL:
        return gates(record, envelope.ce_id, rows)
    if envelope.type == MESSAGE_ACKED:
        found = [
            posting_record(answer, door=XML_DOOR, principal=stream[1].partition("/")[2])
            for answer in answers_of(body)
        ]
        posted = (row(MAILBOX_VIEW, f"{one.stream.partition('/')[2]}/{one.ce_id}") for one in found)
        return [one for one, there in zip(found, posted, strict=True) if there is None]
    if envelope.type == MESSAGE_POSTED:
        return [*opened_threads(body, row), *_system_reads(envelope, stream[1], row)]
    return _told_of_death(body, stream[1], row)


def may_lead_to_more(record: Record) -> bool:
    """Whether it is worth asking how `record` was settled."""
    if record.value is None or len(record.header_values) < 4 or record.key is None:
        return False
    kind = (record.header_values[3] or b"").decode("ascii", "replace")
    if kind == MESSAGE_ACKED:
        return b'"answers"' in record.value
    if kind == MESSAGE_POSTED:
        return b'"root_thread"' in record.value or record.key == f"{MAILBOX}/{DEFAULT_REALM}/{SYSTEM}".encode()
    return kind in _ENDED or (kind in ORGANISM_MODELS and record.key == f"{CONTROL}/{ORGANISM}".encode())


def answers_of(body: dict[str, Any]) -> list[Message]:
    """The answers that an acknowledgement carries."""
    try:
        return list(MessageAck.model_validate(body).answers or ())
    except ValidationError:
        return []


def opened_threads(body: dict[str, Any], row: RowOf) -> list[OutgoingRecord]:
    """The thread that a message is the first of, as far as the rows tell; the fold knows better. A root has no
    row of its own: its threads name it, and in whose name they are.
    """
    parent, root, thread = body.get("parent_thread"), body.get("root_thread"), body.get("thread")
    if parent is None or root is None or thread is None:
        return []
    if row(REGISTRY_THREADS, thread) is not None:
        return []
    opened = ThreadOpened(
        thread=thread,
        parent_thread=parent,
        root_thread=root,
        opened_by=body["from"],
        seen_by=body["to"],
        on_behalf_of=body.get("on_behalf_of") or body["from"],
        kind=body["kind"],
        message_id=body["message_id"],
    )
    ce_id = follow_up_uuid(thread, THREAD_OPENED)
    return [thread_record(opened, ce_id, door=_DOOR, principal=REACTOR)]


def gates(record: Record, cause: str, rows: Rows) -> list[OutgoingRecord]:
    """The mailboxes of listeners that came or went with a change of the organism are opened and closed."""
    found = []
    for listener in rows(REGISTRY_LISTENERS):
        if not isinstance(listener, ListenerRow):
            continue
        is_open = listener.status == ACTIVE
        if (listener.added_at if is_open else listener.removed_at) == record.logged_at_us:
            found.append(gate_of(listener, cause))
    return found


def gate_of(listener: ListenerRow, cause: str) -> OutgoingRecord:
    """The record that opens or closes a listener's mailbox, as its row says, because of the change `cause`."""
    is_open = listener.status == ACTIVE
    ce_id = follow_up_uuid(cause, f"{'open' if is_open else 'close'}/{listener.listener}")
    where = (DEFAULT_REALM, listener.listener, ce_id)
    return gate_record(*where, is_open=is_open, ce_id=ce_id, door=_DOOR, principal=REACTOR)


def follow_up_uuid(cause: str, effect: str) -> str:
    """The id of one effect of a cause."""
    return str(uuid.uuid5(_NAMESPACE, f"{cause}/{effect}"))


def _system_reads(envelope: Envelope, mailbox: str, row: RowOf) -> list[OutgoingRecord]:
    """What is bound for nobody is in the ledger, and that is all: the system reads it."""
    if mailbox != f"{DEFAULT_REALM}/{SYSTEM}":
        return []
    posted = row(MAILBOX_VIEW, f"{mailbox}/{envelope.ce_id}")
    if not isinstance(posted, MessageRow) or posted.status not in MESSAGE_PENDING:
        return []
    return [read_record(DEFAULT_REALM, SYSTEM, envelope.ce_id, door=_DOOR, principal=REACTOR)]


def _came_too_late(envelope: Envelope, body: dict[str, Any]) -> list[OutgoingRecord]:
    """A listener that wrote to another one, which was removed at that moment, is told. Who posts at the door is
    told there.
    """
    if envelope.type != MESSAGE_POSTED or envelope.door != XML_DOOR or body.get("in_reply_to") is None:
        return []
    if body["kind"] == HUH_TAG:
        return []
    thread = body.get("parent_thread")
    message = Message.model_validate(
        {
            "message_id": follow_up_uuid(f"{body['to']}/{body['message_id']}", "closed"),
            "from": SYSTEM,
            "from_verified": True,
            "to": body["from"],
            "kind": HUH_TAG,
            "body": huh("the listener was removed", about_tag=body["kind"], step="routing").decode("utf-8"),
            "content_type": XML_CONTENT,
            "in_reply_to": body["message_id"],
            "thread": thread,
            "root_thread": body.get("root_thread") if thread else None,
        }
    )
    return [posting_record(message, door=XML_DOOR, principal=SYSTEM)]


def _told_of_death(body: dict[str, Any], mailbox: str, row: RowOf) -> list[OutgoingRecord]:
    """Who sent a message that its listener could not handle is told when it is given up."""
    realm, _, listener = mailbox.partition("/")
    dead = row(MAILBOX_VIEW, f"{mailbox}/{body.get('message_id')}")
    if not isinstance(dead, MessageRow) or dead.status != DEAD or realm != DEFAULT_REALM:
        return []
    if not isinstance(row(REGISTRY_LISTENERS, listener), ListenerRow) or dead.kind == HUH_TAG:
        return []
    why = f"handling it failed {dead.attempts} times without an answer; it is not tried again"
    message = Message.model_validate(
        {
            "message_id": follow_up_uuid(f"{mailbox}/{dead.message_id}", DEAD),
            "from": listener,
            "from_verified": True,
            "to": dead.sender,
            "kind": HUH_TAG,
            "body": huh(why, about_tag=dead.kind, step="handler").decode("utf-8"),
            "content_type": XML_CONTENT,
            "in_reply_to": dead.message_id,
            "thread": dead.parent_thread,
            "root_thread": dead.root_thread if dead.parent_thread else None,
        }
    )
    return [posting_record(message, door=XML_DOOR, principal=listener)]
