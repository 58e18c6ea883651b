"""Derived records of the XML pump: answers of handlers, and mailboxes to open or close.

The functions use only the settled record, its verdict and the rows of the live view, so the result is the same
at every gateway. The gateway that has settled a handler's acknowledgement posts its answers itself, at once.
The reactor posts the answers of a gateway that was killed before that, under the same ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

from pydantic import ValidationError

from connectors.hub.reactor.derived_records import BY_REACTOR, system_readings
from connectors.hub.reactor.known_recipients import GetRow
from connectors.plumbing.xml_payloads.huh import HUH_TAG, huh
from schemas.streams.control.organism import ORGANISM, ORGANISM_MODELS, ListenerRow
from schemas.streams.mailboxes.mailbox_bodies import (
    MESSAGE_ACKED,
    MESSAGE_NACKED,
    MESSAGE_RECLAIMED,
    MESSAGES_HANDLED,
    MailboxClosing,
    MailboxOpening,
    MessageAck,
    MessagesHandled,
)
from schemas.streams.mailboxes.mailbox_postings import CLOSED
from schemas.streams.mailboxes.message import (
    DEAD,
    DEFAULT_REALM,
    MESSAGE_POSTED,
    Message,
    MessageRow,
    verified_message,
)
from schemas.streams.principal.principals import ACTIVE, SYSTEM
from schemas.wire.record import BadEnvelopeError, Envelope, OutgoingRecord, Record, read_envelope
from trunkline_agent.wire.ids import CONTROL, MAILBOX, parse_stream_key
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED

XML_DOOR: Final = "xml"
XML_CONTENT: Final = "application/xml"
_NAMESPACE: Final = uuid.UUID("0d4b6c52-5d3e-5b1e-8f36-1f5a9e2c7a40")
_OF_SYSTEM: Final = f"{MAILBOX}/{DEFAULT_REALM}/{SYSTEM}".encode()
_ENDED: Final = frozenset({MESSAGE_RECLAIMED, MESSAGE_NACKED})
_ACKED: Final = frozenset({MESSAGE_ACKED, MESSAGES_HANDLED})
_ACKED_TYPES: Final = frozenset(kind.encode() for kind in _ACKED)

AllListeners = Callable[[type[ListenerRow]], list[ListenerRow]]
"""A function that returns all listeners' rows, also of removed listeners, such as `LiveView.all`."""


def xml_records(
    record: Record, verdict: str, why: str | None, get: GetRow, all_rows: AllListeners
) -> list[OutgoingRecord]:
    """Return the records that the reactor has to append for the XML pump because `record` was settled.

    Usually the list is empty. The records post a handler's answers. They open the mailboxes of added listeners
    and close those of removed ones. If a message will not be handled, they notify its sender.

    Args:
        record: The settled record.
        verdict: Its verdict: accepted, duplicate or rejected.
        why: The explanation of a rejection in a few words; None for another verdict.
        get: The look-up of rows, such as `LiveView.get`. The rows must include the effect of `record`.
        all_rows: Returns the rows of all listeners, also of removed ones, such as `LiveView.all`.
    """
    is_closed = verdict == REJECTED and why == CLOSED
    stream = parse_stream_key(record.key)
    if stream is None or not (verdict == ACCEPTED or is_closed) or not may_have_effects(record, get):
        return []
    if not is_closed and _is_posting(record) and record.key != _OF_SYSTEM:
        return []  # most of the answers
    try:
        envelope = read_envelope(record)
        body = decode(record.value or b"")[0]
    except (BadEnvelopeError, MalformedJsonError):
        return []
    if is_closed:
        return _closed_notice(envelope, body)
    if stream[0] == CONTROL:
        return _gates(record, envelope.ce_id, all_rows)
    if envelope.type in _ACKED:
        listener = stream[1].partition("/")[2]
        found = [answer_record(answer, listener) for answer in answers_of(body)]
        return [one for one in found if get(MessageRow, f"{one.stream.partition('/')[2]}/{one.ce_id}") is None]
    if envelope.type == MESSAGE_POSTED:
        return system_readings(SYSTEM, envelope.ce_id, stream[1], get)
    return _death_notice(body, stream[1], get)


def may_have_effects(record: Record, get: GetRow) -> bool:
    """Return whether `xml_records` may return a record for `record`, so that the record's verdict is needed.

    False is certain: then `xml_records` would return nothing. The check looks at the type, the raw bytes and
    the listener's row alone, which spares the reactor the look-up of most verdicts. `get` is the look-up of
    rows, such as `LiveView.get`.
    """
    if record.value is None or len(record.header_values) < 4 or record.key is None:
        return False
    kind = (record.header_values[3] or b"").decode("ascii", "replace")
    if kind in _ACKED:
        return b'"answers"' in record.value
    if kind == MESSAGE_POSTED:
        if record.key == _OF_SYSTEM:
            return True
        # The answer to a listener is refused if the listener was removed.
        listener = record.key.decode("ascii", "replace").rpartition("/")[2]
        return b'"in_reply_to"' in record.value and get(ListenerRow, listener) is not None
    return kind in _ENDED or (kind in ORGANISM_MODELS and record.key == f"{CONTROL}/{ORGANISM}".encode())


def _is_posting(record: Record) -> bool:
    return record.header_values[3] == MESSAGE_POSTED.encode()


def acknowledged_by(record: Record) -> str | None:
    """Return the id of a record that acknowledges messages and has answers; None for any other record."""
    if record.value is None or len(record.header_values) < 4 or b'"answers"' not in record.value:
        return None
    ce_id, kind = record.header_values[1], record.header_values[3]
    if ce_id is None or kind not in _ACKED_TYPES:
        return None
    return ce_id.decode("utf-8", "replace")


def answers_of(body: dict[str, Any]) -> list[Message]:
    """Return the messages with which handlers answered, from the body of an acknowledgement.

    `body` is the decoded JSON value of a record of the type `message.acked` or `message.handled`. The list is
    empty if the handlers gave no answers or the body is invalid.
    """
    try:
        if "messages" not in body:
            return list(MessageAck.model_validate(body).answers or ())
        handled = MessagesHandled.model_validate(body).messages
        return [answer for one in handled for answer in one.answers or ()]
    except ValidationError:
        return []


def answer_record(answer: Message, listener: str) -> OutgoingRecord:
    """Return the record that posts an answer of a listener. A full mailbox takes it, too."""
    unlimited = answer.model_copy(update={"unlimited": True})
    return unlimited.record(door=XML_DOOR, principal=listener)


def _gates(record: Record, cause: str, all_rows: AllListeners) -> list[OutgoingRecord]:
    """Open and close the mailboxes of the listeners that this change of the organism added or removed."""
    return [
        gate_of(one, cause)
        for one in all_rows(ListenerRow)
        if (one.added_at if one.status == ACTIVE else one.removed_at) == record.logged_at_us
    ]


def gate_of(listener: ListenerRow, cause: str) -> OutgoingRecord:
    """Return the record that opens the mailbox of an active listener, or closes that of a removed one.

    Args:
        listener: The row of the listener after the change.
        cause: The id of the record that added or removed the listener. It determines the id of the new record.
    """
    is_open = listener.status == ACTIVE
    gate = MailboxOpening if is_open else MailboxClosing
    ce_id = _xml_id(cause, f"{'open' if is_open else 'close'}/{listener.listener}")
    return gate(to=listener.listener, request_id=ce_id).record(ce_id=ce_id, **BY_REACTOR)


def _xml_id(cause: str, effect: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{cause}/{effect}"))


def _closed_notice(envelope: Envelope, body: dict[str, Any]) -> list[OutgoingRecord]:
    """Notify a listener that answered another listener which was removed at that moment.

    The sender of any other message gets the refusal from the gateway.
    """
    if envelope.type != MESSAGE_POSTED or envelope.door != XML_DOOR or body.get("in_reply_to") is None:
        return []
    if body["kind"] == HUH_TAG:
        return []
    cause = _xml_id(f"{body['to']}/{body['message_id']}", "closed")
    why = huh("the listener was removed", about_tag=body["kind"], step="routing")
    return [_huh_posting(SYSTEM, body, why, cause)]


def _death_notice(body: dict[str, Any], mailbox: str, get: GetRow) -> list[OutgoingRecord]:
    """Notify the sender of a message that its listener has failed to handle too often."""
    realm, _, listener = mailbox.partition("/")
    dead = get(MessageRow, f"{mailbox}/{body.get('message_id')}")
    if dead is None or dead.status != DEAD or realm != DEFAULT_REALM:
        return []
    if get(ListenerRow, listener) is None or dead.kind == HUH_TAG:
        return []
    why = f"handling it failed {dead.attempts} times without an answer; it is not tried again"
    text = huh(why, about_tag=dead.kind, step="handler")
    names = ("message_id", "thread", "parent_thread", "root_thread")
    about = {"from": dead.sender, **{name: getattr(dead, name) for name in names}}
    return [_huh_posting(listener, about, text, _xml_id(f"{mailbox}/{dead.message_id}", DEAD))]


def _huh_posting(sender: str, about: dict[str, Any], text: bytes, message_id: str) -> OutgoingRecord:
    """Return an error message to the sender of the message `about`, in the same conversation."""
    # A message of another door has no place in the tree, and its thread is the sender's own.
    thread = about.get("parent_thread") or (about.get("thread") if about.get("root_thread") is None else None)
    message = verified_message(
        message_id,
        sender,
        about["from"],
        HUH_TAG,
        text.decode("utf-8"),
        XML_CONTENT,
        in_reply_to=about["message_id"],
        thread=thread,
        root_thread=about.get("root_thread") if thread else None,
        unlimited=True,
    )
    return message.record(door=XML_DOOR, principal=sender)
