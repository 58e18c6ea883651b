"""All records that follow from a settled one: rules of the kinds of streams and of the XML pump; indexes.

The indexes have the sessions made for each job, and the topics of each subscriber.

The rules of the XML pump derive the answers of handlers, and open or close mailboxes. They use only the settled
record, its verdict and the rows of the live view, so the result is the same at every gateway. The gateway that
has settled a handler's acknowledgement posts its answers itself, at once. The reactor posts the answers of a
gateway that was killed before that, under the same ids.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final

from pydantic import ValidationError

from connectors.hub.live.row_lists import RowIndex
from connectors.plumbing.xml_payloads.huh import HUH_TAG, huh
from schemas.effects.effects import FOLLOWS
from schemas.effects.following import BY_REACTOR, DOOR, Cause, Follows, GetRow, Related
from schemas.effects.mailbox_effects import system_readings
from schemas.fold.view_rows import Row
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
from schemas.streams.session.sessions import SessionRow
from schemas.streams.topic.topic_registry import SubscriptionRow
from schemas.wire.record import BadEnvelopeError, OutgoingRecord, Record, read_envelope
from trunkline_agent.wire.ids import CONTROL, MAILBOX, parse_stream_key
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED


class SessionsByJob:
    """The sessions that were made for each job, and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, set[str]] = {}

    def made_for(self, job_id: str) -> list[str]:
        """Return the names of the sessions that were made for a job and have not ended, in no order."""
        with self._lock:
            return list(self._names.get(job_id, ()))

    def add(self, row: Row | None) -> None:
        """Note the session of `row`, or its end, if it was made for a job. Ignore any other row and None."""
        if not isinstance(row, SessionRow) or row.for_job is None:
            return
        with self._lock:
            names = self._names.setdefault(row.for_job, set())
            if row.is_live:
                names.add(row.session)
            else:
                names.discard(row.session)
            if not names:
                del self._names[row.for_job]


class TopicsBySubscriber(RowIndex[SubscriptionRow]):
    """The topics of each subscriber, by the live rows of subscriptions. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(SubscriptionRow)
        self._topics: dict[str, set[str]] = {}

    def topics_of(self, subscriber: str) -> list[str]:
        """Return the names of the topics of a subscriber, in no order."""
        with self._lock:
            return list(self._topics.get(subscriber, ()))

    def count(self, subscriber: str) -> int:
        """Return the number of topics of a subscriber."""
        with self._lock:
            return len(self._topics.get(subscriber, ()))

    def _add(self, row: SubscriptionRow) -> None:
        topics = self._topics.setdefault(row.subscriber, set())
        if row.is_live:
            topics.add(row.topic)
        else:
            topics.discard(row.topic)
        if not topics:
            del self._topics[row.subscriber]


XML_DOOR: Final = "xml"
XML_CONTENT: Final = "application/xml"
_NAMESPACE: Final = uuid.UUID("0d4b6c52-5d3e-5b1e-8f36-1f5a9e2c7a40")
_OF_SYSTEM: Final = f"{MAILBOX}/{DEFAULT_REALM}/{SYSTEM}".encode()
_ACKED: Final = frozenset({MESSAGE_ACKED, MESSAGES_HANDLED})
_ACKED_TYPES: Final = frozenset(kind.encode() for kind in _ACKED)


def acknowledged_by(record: Record) -> str | None:
    """Return the id of a record that acknowledges messages and has answers; None for any other record."""
    if record.value is None or len(record.header_values) < 4 or b'"answers"' not in record.value:
        return None
    ce_id, kind = record.header_values[1], record.header_values[3]
    if ce_id is None or kind not in _ACKED_TYPES:
        return None
    return ce_id.decode("utf-8", "replace")


def _answers_of(body: dict[str, Any]) -> list[Message]:
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


def _answers(cause: Cause) -> list[OutgoingRecord]:
    """Post the answers of a handler, unless the gateway has posted them."""
    if cause.verdict != ACCEPTED:
        return []
    listener = cause.name.partition("/")[2]
    found = [answer_record(answer, listener) for answer in _answers_of(cause.body)]
    return [
        one for one in found if cause.get(MessageRow, f"{one.stream.partition('/')[2]}/{one.ce_id}") is None
    ]


def _gates(cause: Cause) -> list[OutgoingRecord]:
    """Open and close the mailboxes of the listeners that this change of the organism added or removed."""
    if cause.verdict != ACCEPTED:
        return []
    listeners = [cause.get(ListenerRow, name) for name in cause.related(ListenerRow, ORGANISM)]
    return [
        gate_of(one, cause.id)
        for one in listeners
        if one is not None
        and (one.added_at if one.status == ACTIVE else one.removed_at) == cause.record.logged_at_us
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


def _after_posting(cause: Cause) -> list[OutgoingRecord]:
    """Read a message to the pump itself. Notify a listener whose answer goes to a removed one.

    The sender of any other message to a removed listener gets the refusal from the gateway.
    """
    body = cause.body
    if cause.verdict == ACCEPTED:
        return system_readings(SYSTEM, cause.id, cause.name, cause.get)
    is_closed = cause.verdict == REJECTED and cause.why == CLOSED
    if not is_closed or cause.envelope.door != XML_DOOR or body.get("in_reply_to") is None:
        return []
    if body["kind"] == HUH_TAG:
        return []
    message_id = _xml_id(f"{body['to']}/{body['message_id']}", "closed")
    why = huh("the listener was removed", about_tag=body["kind"], step="routing")
    return [_huh_posting(SYSTEM, body, why, message_id)]


def _death_notice(cause: Cause) -> list[OutgoingRecord]:
    """Notify the sender of a message that its listener has failed to handle too often."""
    realm, _, listener = cause.name.partition("/")
    dead = (
        cause.get(MessageRow, f"{cause.name}/{cause.body.get('message_id')}")
        if cause.verdict == ACCEPTED
        else None
    )
    if dead is None or dead.status != DEAD or realm != DEFAULT_REALM:
        return []
    if cause.get(ListenerRow, listener) is None or dead.kind == HUH_TAG:
        return []
    why = f"handling it failed {dead.attempts} times without an answer; it is not tried again"
    text = huh(why, about_tag=dead.kind, step="handler")
    names = ("message_id", "thread", "parent_thread", "root_thread")
    about = {"from": dead.sender, **{name: getattr(dead, name) for name in names}}
    return [_huh_posting(listener, about, text, _xml_id(f"{cause.name}/{dead.message_id}", DEAD))]


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


def _has_answers(cause: Cause) -> bool:
    return b'"answers"' in (cause.record.value or b"")


def _asks_of_posting(cause: Cause) -> bool:
    if cause.record.key == _OF_SYSTEM:
        return True
    # The answer to a listener is refused if the listener was removed.
    is_reply = b'"in_reply_to"' in (cause.record.value or b"")
    return is_reply and cause.get(ListenerRow, cause.name.partition("/")[2]) is not None


# The text of a `<huh>` is the door's, so these rules are not those of the kinds.
_XML_FOLLOWS: Final = {
    MAILBOX: (
        Follows(_ACKED, _answers, _has_answers),
        Follows(frozenset({MESSAGE_POSTED}), _after_posting, _asks_of_posting),
        Follows(frozenset({MESSAGE_RECLAIMED, MESSAGE_NACKED}), _death_notice, lambda _: True),
    ),
    CONTROL: (Follows(frozenset(ORGANISM_MODELS), _gates, lambda _: True),),
}


_NOTICES_MOST: Final = 10_000
_RULES: Final[dict[tuple[str, str], list[Follows]]] = {}
for _kind, _rules in (*FOLLOWS.items(), *_XML_FOLLOWS.items()):
    for _rule in _rules:
        for _type in _rule.types:
            _RULES.setdefault((_kind, _type), []).append(_rule)


def cause_of(record: Record, get: GetRow, related: Related) -> Cause | None:
    """Return a record as the rules get it, or None if nothing can follow from it. See `Cause`."""
    stream = parse_stream_key(record.key)
    if stream is None:
        return None
    try:
        return Cause(record, read_envelope(record), *stream, get, related)
    except BadEnvelopeError:
        return None


def derived_records(cause: Cause, ask: Callable[[Cause], object]) -> list[OutgoingRecord]:
    """Return the records that the reactor has to append because a record was settled. Usually there are none.

    Args:
        cause: The settled record.
        ask: Sets the verdict of `cause`. It is called only if a rule needs it, because it may have to wait.
    """
    found: list[OutgoingRecord] = []
    for rule in _RULES.get((cause.kind, cause.record_type), ()):
        if rule.asks is not None:
            if not rule.asks(cause):
                continue
            if cause.verdict is None:
                ask(cause)
        found += rule.derive(cause)
    return found


class FewNotices:
    """The newest notices that the reactor of this process has derived (LM-05). Thread-safe.

    The sender of an MQTT message gets one notice a minute of the full mailbox of each recipient.

    All refusals of a sender, recipient and minute have a notice with the same id, and only the first is
    appended. If its cause comes again, the same notice is derived again, as the fold's duplicate.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._causes: OrderedDict[str, bytes | None] = OrderedDict()

    def first(self, records: Iterable[OutgoingRecord]) -> list[OutgoingRecord]:
        """Return the records without those whose id was used for another content before."""
        found = []
        with self._lock:
            for record in records:
                if record.door == DOOR:
                    known = self._causes.setdefault(record.ce_id, record.value)
                    if known != record.value:
                        continue
                    if len(self._causes) > _NOTICES_MOST:
                        self._causes.popitem(last=False)
                found.append(record)
        return found
