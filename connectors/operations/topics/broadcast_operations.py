"""The operations that send one message to all, and that read the audit log (HH-06, HH-08, DL-07)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from connectors.hub.engine.family import Family
from connectors.hub.engine.operation import SMALL_BYTES, Answer, Asked, Operation, Unusual
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import encoded_within, refuse_rejected
from connectors.hub.serving.identities import request_uuid
from connectors.hub.serving.policy import Action
from connectors.operations.blobs.blobs import reference_to
from connectors.operations.messages.message_operations import MESSAGES
from connectors.operations.rules.agent_models import BroadcastAnswer, BroadcastRequest
from connectors.operations.rules.hub_policy import (
    broadcast_recipients,
    check_message,
    check_rate,
    keep_mailbox,
    limited_posting,
    note_full,
    post_to_all,
)
from connectors.operations.rules.message_models import AuditAnswer, AuditFilter
from connectors.operations.topics.topics import Published
from schemas.streams.agents.agent_registry import PRESENT
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.mailboxes.message import Message, verified_message
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, MAILBOX_FULL

AUDIT: Final = Family("/api/hub/audit")
# The engine sends no more messages at once, which all take one of the sender's places (`UnderWay`).
_AT_ONCE: Final = 16


class BroadcastMessage(Operation):
    """Put a message into the mailboxes of all other participants and of the operator.

    The answer comes when all messages are stored, and has their number. A mailbox that is full gets none.
    Repeating an interrupted broadcast with the same idempotency key completes it. It then also reaches
    participants that have come since.
    """

    NAME = "broadcast_message"
    PATH = f"{MESSAGES}/broadcast"
    ACTION = Action.MESSAGE_BROADCAST
    ANSWER = BroadcastAnswer
    BODY = BroadcastRequest
    IS_BOUNDED = True

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return a record for each recipient. A message with a blob, or to many participants, is unusual."""
        hub, body = self.hub, asked.body
        if body.blob is not None or hub.lists.participants.count([PRESENT]) > _AT_ONCE:
            raise Unusual
        recipients = broadcast_recipients(hub.lists, asked.caller.principal)
        if len(recipients) * len(body.content()[1]) > SMALL_BYTES:
            raise Unusual
        self._check(asked, recipients)
        asked.known = self._messages(asked, recipients)
        for message in asked.known:
            keep_mailbox(hub, message)  # each id is of one recipient, so none is refused
        return [limited_posting(hub, message, **asked.origin) for message in asked.known]

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell how many mailboxes have got the message."""
        for message, one in zip(asked.known, settled, strict=True):
            note_full(self.hub, message, one)
        verdicts = [refuse_rejected(one).verdict for one in settled if one.reason != MAILBOX_FULL]
        return self._answer_of(asked, verdicts, len(settled) - len(verdicts))

    def ended(self, asked: Asked) -> None:
        """Let others use the messages' ids."""
        for message in asked.known:
            self.hub.under_way.mailboxes.pop(message.message_id, None)

    async def later(self, asked: Asked) -> Answer:
        """Send the messages, each with a record of its own, so that few of them are in memory."""
        recipients, digest = broadcast_recipients(self.hub.lists, asked.caller.principal), asked.body.blob
        self._check(asked, recipients)
        blob = None if digest is None else await reference_to(self.hub, digest)
        messages = self._messages(asked, recipients, blob)
        return self._answer_of(asked, *await post_to_all(self.hub, messages, asked.origin))

    def _check(self, asked: Asked, recipients: list[str]) -> None:
        if recipients:
            # All recipients exist and no other rule depends on the recipient, so one check is enough.
            check_message(self.hub, asked.caller, recipients[0], asked.body.type, self.route)

    def _messages(
        self, asked: Asked, recipients: list[str], blob: BlobReference | None = None
    ) -> list[Message]:
        """Return the messages. Raises ApiError (429) if they are too many of their sender."""
        caller, body, broadcast_id = asked.caller, asked.body, str(asked.made)
        # All copies share the text.
        kind, text, content_type = body.content()
        about = {"from_task": caller.task_id, "broadcast_id": broadcast_id, "blob": blob, **body.in_the_log()}
        messages = [
            verified_message(
                str(request_uuid(broadcast_id, one)), caller.principal, one, kind, text, content_type, **about
            )
            for one in recipients
        ]
        check_rate(self.hub, caller.principal, len(text.encode()) * len(messages), len(messages), self.route)
        return messages

    def _answer_of(self, asked: Asked, verdicts: Sequence[str], full: int) -> Answer:
        verdict = DUPLICATE if set(verdicts) == {DUPLICATE} else ACCEPTED
        return Answer(self.document(asked, Published(len(verdicts), full)), verdict)

    def document(self, asked: Asked, found: Published) -> dict[str, Any]:
        """Return the answer as its door spells it."""
        return {"broadcast_id": str(asked.made), "recipients": found.recipients, "full": found.full}


@AUDIT.get("", Action.AUDIT_READ, AuditAnswer, COMMAND="messages audit")
async def read_audit(hub: Hub, asked: Asked, wanted: AuditFilter) -> dict[str, Any]:
    """Show the audit log: the newest delivered messages, and the newest refused requests to send one.

    `limit` is the number of entries, by default the setting `gateway.audit_messages`. An answer has
    `limits.answer_bytes` at most; `left` is the number of older entries beyond that.
    """
    entries = hub.audit.newest(wanted.limit)
    shown = encoded_within(reversed(entries), hub.settings.limits.answer_bytes)
    return {"entries": shown[::-1], "left": len(entries) - len(shown)}
