"""The operations that list the dead messages of all mailboxes, and replay a dead message (DL-10).

A replay is a new message with the content of the dead one. The dead message stays as it is.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Final

from fastapi import Path, Response

from connectors.hub.engine.family import LongAnswer
from connectors.hub.engine.operation import Answer, Asked, Behind, IsGone, Operation, Unusual
from connectors.hub.live.live_store import LiveRows
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError, json_answer, not_found, refuse_rejected
from connectors.hub.serving.identities import NAMESPACE
from connectors.hub.serving.models import NAMED, NoFields
from connectors.hub.serving.policy import Action
from connectors.operations.blobs.blobs import reference_to
from connectors.operations.messages.message_operations import OF_MESSAGES
from connectors.operations.messages.shown_messages import answer_bytes_of, blob_of
from connectors.operations.principals.principal_operations import (
    MAILBOX,
    MessagesAnswer,
    NamePath,
    RealmPath,
    newest_with_bodies,
)
from connectors.operations.rules.agent_models import ReplayedAnswer, TaskLimit
from connectors.operations.rules.hub_policy import check_room
from connectors.operations.rules.owners import owner_of_mailbox
from schemas.streams.mailboxes.message import DEAD, Message, MessageBodyRow, MessageRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS
from trunkline_agent.wire.moments import has_come
from trunkline_agent.wire.verdicts import DUPLICATE, ILLEGAL_TRANSITION

MessagePath = Annotated[str, Path(**NAMED, description="Id of the dead message.")]
_COPIED: Final = (
    "realm",
    "from_verified",
    "from_task",
    "priority",
    *(one.name for one in MESSAGE_FIELDS),
    "broadcast_id",
    "topic",
    "sent_at",
    "expires_at",
    "parent_thread",
    "hops",
    "root_thread",
    "on_behalf_of",
)


@OF_MESSAGES.get("/dead", Action.MAILBOX_READ, MessagesAnswer)
def list_dead_messages(hub: Hub, asked: Asked, wanted: TaskLimit) -> LongAnswer:
    """Show the newest dead messages of all mailboxes, with their attempts and last reasons.

    The order is that of their ends, oldest first. The gateway keeps the newest 100,000 dead messages, and
    `total` counts them; the view `mailbox` in the tables has all of them. An answer has
    `limits.answer_bytes` at most; `left` is the number of older messages that were asked for beyond that.
    """
    most = hub.settings.limits.answer_bytes
    size = answer_bytes_of(hub, None, wanted.limit, most)
    return LongAnswer(size, partial(newest_dead, hub.live_view, wanted.limit, most))


class ReplayMessage(Operation):
    """Post a dead message again to the same mailbox, as a new message whose `replay_of` is the dead one.

    Requests without an idempotency key replay a dead message once, whoever sends them. To replay it once
    more, send a key that was not used before. The answer is 404 for an unknown message, and 409 for one
    that is not dead, whose `expires_at` has passed or whose blob was removed.
    """

    NAME = "replay_message"
    PATH = f"{MAILBOX}/messages/{{message_id}}/replay"
    PARAMETERS: ClassVar = {"realm": RealmPath, "name": NamePath, "message_id": MessagePath}
    ACTION = Action.MESSAGE_REPLAY
    ANSWER = ReplayedAnswer
    BODY = NoFields
    NEEDS_BODY = False

    def owner(self, asked: Asked) -> str | None:
        """Return the owner of the mailbox."""
        return owner_of_mailbox(self.hub, asked)

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the new message's record; none if it exists. A message with a blob is unusual."""
        key = "/".join(asked.path[one] for one in ("realm", "name", "message_id"))
        new_id = _replay_id(asked, key)
        try:
            message = _replay(self.hub, key, new_id)
        except ApiError:
            if asked.is_fresh:
                raise
            # Another gateway may have settled the message's end, or this request, a moment ago.
            raise Behind from None
        asked.known = new_id, message
        if message is None:
            return ()
        if message.blob is not None:
            raise Unusual
        return (self._record(asked, message),)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell the new message's id."""
        verdict = refuse_rejected(settled[0]).verdict if settled else DUPLICATE
        return Answer({"replayed": True, "message_id": asked.known[0]}, verdict)

    async def slowly(self, asked: Asked, is_gone: IsGone) -> Response:
        """Replay a message with a blob."""
        message = asked.known[1]
        await reference_to(self.hub, message.blob.digest)
        document, verdict = self.answer(asked, [await self.hub.appender.settle(self._record(asked, message))])
        return json_answer(document, verdict=verdict)

    def _record(self, asked: Asked, message: Message) -> OutgoingRecord:
        check_room(self.hub, message.sender, message.recipient)
        return message.record(**asked.origin)


def _replay_id(asked: Asked, key: str) -> str:
    """Return the id of the message that replays the dead message `key`.

    Without an idempotency key it depends on the dead message alone. Neither a double click, nor a second
    person, nor a retry at another gateway then doubles the message. If the replay dies, too, it is a dead
    message of its own that can be replayed.
    """
    return str(uuid.uuid5(NAMESPACE if asked.key is None else asked.made, f"replay/{key}"))


def _replay(hub: Hub, key: str, new_id: str) -> Message | None:
    """Return the message that replays the dead message `key`, or None if `new_id` has replayed it before.

    The sender stays that of the dead message, and so does `from_verified`: the door that received the message
    has authenticated the sender or not. The record's own door and principal name the client that replays it.
    Raises ApiError: 404 for an unknown message, 409 for one that is not dead or has expired.
    """
    row, body = hub.live_view.get(MessageRow, key), hub.live_view.get(MessageBodyRow, key)
    if row is None or body is None:
        raise not_found("no such message in this mailbox, or it is not among those that the gateway keeps")
    known = hub.live_view.get(MessageRow, f"{row.realm}/{row.recipient}/{new_id}")
    if known is not None and known.replay_of == row.message_id:
        return None  # the fold alone would not know it, because it forgets an id after a week
    if row.status != DEAD:
        why = f"only a dead message can be replayed, and this one is {row.status}"
        raise ApiError(409, ILLEGAL_TRANSITION, why)
    if row.expires_at is not None and has_come(row.expires_at, hub.log_clock.now_us()):
        why = "the message has expired, so nobody may get it any more; send a new message instead"
        raise ApiError(409, ILLEGAL_TRANSITION, why)
    fields = {name: getattr(row, name) for name in _COPIED}
    content = {
        "kind": row.kind,
        "body": body.body,
        "content_type": body.content_type,
        "blob": blob_of(row, body),
    }
    named = {"message_id": new_id, "from": row.sender, "to": row.recipient, "replay_of": row.message_id}
    return Message.model_validate({**fields, **content, **named})


def newest_dead(live_view: LiveRows, limit: int, bytes_most: int) -> dict[str, Any]:
    """Return the answer of the route that lists dead messages: the newest `limit`, and how many there are."""
    newest = list(islice(live_view.newest_ended(MessageRow, DEAD), limit))
    total = live_view.count_ended(MessageRow, DEAD)
    return {**newest_with_bodies(live_view, newest, bytes_most), "total": total}
