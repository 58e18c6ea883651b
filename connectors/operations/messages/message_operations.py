"""The operations of messages of one mailbox: sending, taking and marking (HH-06, DL-01)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from fastapi import Header, Response
from pydantic import Field

from connectors.hub.engine.family import Family, LongAnswer
from connectors.hub.engine.operation import (
    SMALL_BYTES,
    Answer,
    Asked,
    Behind,
    Call,
    IsGone,
    Operation,
    Unusual,
    Waiting,
)
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.audit_log import why_refused
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.services.mailboxes import own_mailboxes
from connectors.hub.serving.admission import WhyRefused
from connectors.hub.serving.answers import json_answer, refuse_rejected
from connectors.hub.serving.identities import request_uuid
from connectors.hub.serving.models import ERRORS, AnswerBody
from connectors.hub.serving.policy import Action
from connectors.operations.blobs.blobs import reference_to
from connectors.operations.messages.deliveries import (
    ATTEMPTS,
    Taken,
    Taking,
    earlier_taking,
    take_messages,
    taken_as_json,
    taken_by,
    taking_record,
    wait_reply,
)
from connectors.operations.messages.shown_messages import answer_bytes_of, message_as_json
from connectors.operations.rules.hub_policy import (
    check_limits,
    check_message,
    check_room,
    keep_mailbox,
    limited_posting,
    note_full,
    post_message,
)
from connectors.operations.rules.message_models import (
    DeliveredAnswer,
    DrainedAnswer,
    DrainFilter,
    MessageEnvelope,
    ReadAnswer,
    ReadRequest,
    SendFilter,
)
from connectors.operations.rules.read_marks import ReadMarks, mark_records, marks_of, plan_marks
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.mailboxes.message import LEASED, PRIORITIES, Message, MessageRow, verified_message
from schemas.streams.mailboxes.pending_message import is_lease_held
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.moments import has_come
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

MESSAGES: Final = "/api/hub/messages"
OF_MESSAGES: Final = Family(MESSAGES)
# The bytes that the reading of a message costs, as if they were in the answer.
_READ_BYTES: Final = 64
RequestId = Annotated[
    str | None,
    Header(
        alias="X-Request-ID",
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="A request with an id that was used before is the same request and gets the same messages.",
    ),
]
"""The header, 1 to 255 visible ASCII characters."""


class SendMessage(Operation):
    """Put a message into the mailbox of its recipient, which by default is the hub.

    The answer comes when the message is stored. The answer is 404 for an unknown recipient, and 403 when
    the caller may not write to the recipient. It is 409 when the idempotency key was used for another
    message, and 429 when too many messages wait for a listener.

    With `deliver_after_s`, the recipient sees the message after that time. With `expires_in_s`, a message
    that nobody has taken by then ends as expired. Both count from the time when the log stores the message.

    `blob` is the digest of a large content that was uploaded before, and that only the recipient gets. The
    answer is 404 for an unknown blob, and 409 for one that was removed or will be soon: upload it again.

    With `wait_reply`, the request waits for a message of the recipient in the caller's mailbox whose
    `in_reply_to` is this message, takes it, and answers with it. Without a reply in time the answer is 202;
    the reply will be in the mailbox. A repeated request with the same idempotency key waits again, and gets
    the same reply. With `reply_lease`, the reply is leased for so many seconds, and `lease_id` names the
    lease. Unless it is acknowledged in time, the reply is in the mailbox again.
    """

    NAME = "send_message"
    PATH = MESSAGES
    ACTION = Action.MESSAGE_SEND
    ANSWER = DeliveredAnswer
    BODY = MessageEnvelope
    QUERY = SendFilter
    RESPONSES: ClassVar = {202: {"model": DeliveredAnswer, "description": "No reply came in time."}, **ERRORS}
    IS_BOUNDED = True

    @property
    def why_refused(self) -> WhyRefused:
        """Name recipient and type beside the fault."""
        return why_refused

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the message's record. A message with a blob, and one whose reply is awaited, are unusual."""
        if asked.body.blob is not None or asked.query.wait_reply:
            raise Unusual
        self.check(asked)
        message = self._message(asked, None)
        keep_mailbox(self.hub, message)
        asked.known = message
        return (limited_posting(self.hub, message, **asked.origin),)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell the message's id."""
        note_full(self.hub, asked.known, settled[0])
        verdict = refuse_rejected(settled[0]).verdict
        return Answer(self.document(asked), verdict)

    def ended(self, asked: Asked) -> None:
        """Let others use the message's id."""
        self.hub.under_way.mailboxes.pop(asked.known.message_id, None)

    async def later(self, asked: Asked) -> Answer:
        """Send a message with a blob, or without one."""
        hub, body = self.hub, asked.body
        self.check(asked)
        is_new = hub.mailboxes.mailbox_of(str(asked.made)) is None
        blob = None if body.blob is None else await reference_to(hub, body.blob, body.recipient, is_new=is_new)
        settled = await post_message(hub, self._message(asked, blob), asked.origin)
        return Answer(self.document(asked), settled.verdict)

    async def slowly(self, asked: Asked, is_gone: IsGone) -> Response:
        """Return the answer to a message that was sent, with `wait_reply` after a wait for its reply.

        `is_gone` tells whether the client has left meanwhile: then its reply stays in the mailbox.
        """
        hub, wanted = self.hub, asked.query
        if not wanted.wait_reply:
            return await super().slowly(asked, is_gone)
        mailboxes = own_mailboxes(asked.caller, hub.settings.gateway.mailbox_per_token)
        with hub.mailbox_waits.waiting(mailboxes, is_taker=False) as wait:
            said, verdict = await self.later(asked)
            reply = await wait_reply(
                hub,
                wait,
                str(asked.made),
                asked.body.recipient,
                wanted.wait_reply,
                asked.origin,
                partial(is_gone, is_probed=wanted.reply_lease is None),
                wanted.reply_lease,
            )
        if reply is None:
            return json_answer(said, 202, verdict)
        if reply.status == LEASED:
            said["lease_id"] = reply.request_id
        return json_answer({**said, "reply": message_as_json(hub, reply)}, verdict=verdict)

    def check(self, asked: Asked) -> None:
        """Raise ApiError if the caller may not send the message to this recipient, and record the refusal."""
        check_message(self.hub, asked.caller, asked.body.recipient, asked.body.type, self.route)

    def check_room(self, message: Message) -> None:
        """Raise ApiError (429) if too many messages wait for the recipient."""
        check_room(self.hub, message.sender, message.recipient)

    def document(self, asked: Asked) -> dict[str, Any]:
        """Return the answer as its door spells it."""
        return {"delivered": asked.body.deliver_after_s is None, "message_id": str(asked.made)}

    def _message(self, asked: Asked, blob: BlobReference | None) -> Message:
        """Return the message. Raises ApiError (429) if a new one exceeds a limit."""
        caller, body = asked.caller, asked.body
        message = verified_message(
            str(asked.made),
            caller.principal,
            body.recipient,
            *body.content(),
            from_task=caller.task_id,
            blob=blob,
            **body.in_the_log(),
        )
        if asked.key is None or self.hub.mailboxes.mailbox_of(message.message_id) is None:
            self.check_room(message)
            check_limits(self.hub, message, self.route)
        return message


class _Taken(NamedTuple):
    taking: Taking
    mailbox: Mailbox = ("", "")
    request_id: str = ""


class TakeMessages(Operation):
    """Take at most `limit` messages out of the caller's mailbox, the most urgent first.

    The list is empty when no message waits. With `wait`, the request waits up to so many seconds for the
    first one. Only one request gets each message. The bodies of one answer have `limits.answer_bytes` at
    most, unless there is only one. The field `left` is the number of messages that still wait. A request
    with the `X-Request-ID` of an earlier one gets the same messages again.

    With `lease`, the messages are leased for so many seconds. A message that is not acknowledged in this
    time (`ack`) is handed out again, before newer ones of its priority. It is dead when it was handed out
    `gateway.max_attempts` times.
    """

    NAME = "drain_messages"
    METHOD = "GET"
    PATH = MESSAGES
    ACTION = Action.MESSAGE_DRAIN
    ANSWER = DrainedAnswer
    QUERY = DrainFilter
    KEY: ClassVar = RequestId

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the claim or the lease, once a message waits.

        A request that has got messages before is unusual, and so are a long answer and a silent client.
        """
        hub, taking = self.hub, self._taking(asked)
        asked.known = _Taken(taking)
        if asked.is_gone:
            return ()
        hub.appender.check()
        # The earlier request may have taken messages from another mailbox than this one would now.
        if taking.is_repeatable and (len(taking.mailboxes) > 1 or earlier_taking(hub, taking) is not None):
            raise Unusual
        now_us = hub.log_clock.now_us()
        mailbox = next((one for one in taking.mailboxes if hub.mailboxes.ready(one, now_us)), None)
        if mailbox is None:
            left_s = taking.wait_s - (time.monotonic() - asked.began)
            if left_s > 0:
                # A lease comes back by itself from a client that has gone.
                raise Waiting(taking.mailboxes, left_s, taking.request, is_probed=taking.lease_s is None)
            if not asked.is_fresh:
                raise Behind
            return ()
        # Others wait for room, or for a sign of the client.
        is_small = answer_bytes_of(hub, mailbox, taking.limit, taking.bytes_most) <= SMALL_BYTES
        if not is_small or (taking.lease_s is None and not asked.is_heard()):
            raise Unusual
        asked.known = _Taken(taking, mailbox, taking.request_id(asked.attempts))
        return (taking_record(hub, *asked.known),)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Hand out the messages that the log gave to this request."""
        taking, taken = asked.known.taking, Taken()
        if settled:
            refuse_rejected(settled[0])
            taken, is_lost = taken_by(self.hub, *asked.known)
            asked.attempts += 1
            if is_lost and asked.attempts < ATTEMPTS:
                raise Behind
        return Answer(taken_as_json(self.hub, taking, taken))

    async def slowly(self, asked: Asked, is_gone: IsGone) -> Response:
        """Wait for the first message, and give a repeated request what it got before."""
        taking = self._taking(asked)
        # A lease comes back by itself from a client that has gone.
        taken = await take_messages(self.hub, taking, partial(is_gone, is_probed=taking.lease_s is None))
        return json_answer(taken_as_json(self.hub, taking, taken))

    def _taking(self, asked: Asked) -> Taking:
        settings, wanted, key = self.hub.settings, asked.query, asked.key
        return Taking(
            mailboxes=own_mailboxes(asked.caller, settings.gateway.mailbox_per_token),
            origin=asked.origin,
            made=request_uuid(asked.caller.requester, None if key is None else f"drain/{key}"),
            is_repeatable=key is not None,
            limit=wanted.limit,
            bytes_most=settings.limits.answer_bytes,
            lease_s=wanted.lease,
            wait_s=wanted.wait,
        )


class MarkMessagesRead(Operation):
    """Mark messages of the caller's own mailbox as read, so that no drain gets them.

    The answer lists the ids that are read now, that could not be marked, and that are unknown. Marking the
    same messages again changes nothing, with or without an idempotency key.
    """

    NAME = "mark_messages_read"
    PATH = f"{MESSAGES}/read"
    ACTION = Action.MESSAGE_MARK
    ANSWER = ReadAnswer
    BODY = ReadRequest

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return a mark for each message that is not read yet."""
        mailboxes = own_mailboxes(asked.caller, self.hub.settings.gateway.mailbox_per_token)
        asked.known = plan_marks(self.hub, mailboxes, asked.body.message_ids)
        return mark_records(asked.known, **asked.origin)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell the ids by their result."""
        marks = marks_of(asked.known, settled)
        verdict = ACCEPTED if marks.marked else DUPLICATE if marks.read_before else None
        return Answer(self.document(asked, marks), verdict)

    def document(self, asked: Asked, marks: ReadMarks) -> dict[str, Any]:
        """Return the answer as its door spells it."""
        read = {*marks.marked, *marks.read_before}
        said = {"read": [one for one in dict.fromkeys(asked.body.message_ids) if one in read]}
        return {**said, "not_marked": marks.not_marked, "unknown": marks.unknown}


class CountAnswer(AnswerBody):
    """The numbers of messages that wait in the caller's mailbox."""

    high: Annotated[int, Field(examples=[1])]
    """Number of messages of the priority `high`."""
    normal: Annotated[int, Field(examples=[2])]
    """Number of messages of the priority `normal`."""
    low: Annotated[int, Field(examples=[0])]
    """Number of messages of the priority `low`."""
    total: Annotated[int, Field(examples=[3])]
    """Number of all of them."""


@OF_MESSAGES.get(
    "/count",
    Action.MESSAGE_DRAIN,
    CountAnswer,
    TOOL="count_messages",
    COMMAND="messages count",
    CALL=Call("count"),
)
def count_messages(hub: Hub, asked: Asked) -> LongAnswer:
    """Count the messages that wait in the caller's mailbox, by priority.

    A message that is leased, delayed or expired does not wait.
    """
    mailboxes = own_mailboxes(asked.caller, hub.settings.gateway.mailbox_per_token)
    most = sum(map(hub.mailboxes.depth, mailboxes))
    return LongAnswer(_READ_BYTES * most, partial(_counted, hub, mailboxes, hub.log_clock.now_us()))


def _counted(hub: Hub, mailboxes: Sequence[Mailbox], now_us: int) -> dict[str, int]:
    keys = ("/".join((*mailbox, one)) for mailbox in mailboxes for one in hub.mailboxes.waiting(mailbox))
    rows = (hub.live_view.get(MessageRow, key) for key in keys)
    found = Counter(row.priority for row in rows if row is not None and _is_waiting(row, now_us))
    return {**{priority: found[priority] for priority in PRIORITIES}, "total": found.total()}


def _is_waiting(row: MessageRow, now_us: int) -> bool:
    is_held = row.status == LEASED and is_lease_held(row.lease_until or 0, now_us)
    is_over = row.expires_at is not None and has_come(row.expires_at, now_us)
    return row.is_live and not is_held and not is_over
