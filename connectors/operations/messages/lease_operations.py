"""The operations of leased messages: acknowledging, giving back, and more time (DL-02, DL-03)."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from connectors.hub.engine.operation import Answer, Asked, Behind, Operation
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.services.mailboxes import own_mailboxes
from connectors.hub.serving.policy import Action
from connectors.operations.messages.deliveries import (
    LeaseEnds,
    lease_ends,
    places_of,
)
from connectors.operations.messages.message_operations import MESSAGES
from connectors.operations.rules.message_models import (
    AckRequest,
    ExtendedAnswer,
    ExtendRequest,
    LeaseEndAnswer,
    NackRequest,
)
from schemas.streams.mailboxes.mailbox_bodies import MessageAck, MessageExtension, MessageNack
from schemas.streams.mailboxes.message import MessageRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE


class LeaseOperation(Operation):
    """An operation on leased messages, with a record for each."""

    ACTION = Action.MESSAGE_DRAIN
    ANSWER: ClassVar[type[BaseModel]] = LeaseEndAnswer

    @abstractmethod
    def record(self, asked: Asked, mailbox: Mailbox, message_id: str) -> OutgoingRecord:
        """Return the record about one message."""

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return a record for each message that is in one of the caller's mailboxes."""
        wanted = list(dict.fromkeys(asked.body.message_ids))
        places = places_of(self.hub, self._mailboxes(asked), wanted)
        if len(places) < len(wanted) and not asked.is_fresh:
            raise Behind
        asked.known = wanted, list(places)
        return [self.record(asked, place, one) for one, place in places.items()]

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell which messages were changed, and why the others were not."""
        wanted, known = asked.known
        ends = lease_ends(wanted, known, settled)
        verdict = ACCEPTED if ends.is_new else DUPLICATE if ends.done else None
        return Answer(self.document(asked, ends), verdict)

    def document(self, asked: Asked, ends: LeaseEnds) -> dict[str, Any]:
        """Return the answer as its door spells it."""
        refused = [
            {"message_id": one, "reason": reason, "message": why} for one, (reason, why) in ends.refused.items()
        ]
        return {"done": ends.done, "refused": refused}

    def _mailboxes(self, asked: Asked) -> tuple[Mailbox, ...]:
        return own_mailboxes(asked.caller, self.hub.settings.gateway.mailbox_per_token)


def _leased(asked: Asked, mailbox: Mailbox, message_id: str) -> dict[str, Any]:
    realm, recipient = mailbox
    return {"realm": realm, "to": recipient, "message_id": message_id, "request_id": asked.body.lease_id}


class AcknowledgeMessages(LeaseOperation):
    """Acknowledge leased messages, so that they are never handed out again.

    It also works after the end of the lease, until a message is handed out again. `refused` lists the
    messages of which the caller no longer has the lease. Acknowledging again changes nothing.
    """

    NAME = "acknowledge_messages"
    PATH = f"{MESSAGES}/ack"
    BODY = AckRequest

    def record(self, asked: Asked, mailbox: Mailbox, message_id: str) -> OutgoingRecord:
        """Return the acknowledgement."""
        return MessageAck(**_leased(asked, mailbox, message_id)).record(**asked.origin)


class GiveBackMessages(LeaseOperation):
    """Give leased messages back, to be handed out again at once, or to be dead after the last attempt.

    `reason` is shown with a message that is dead. `refused` lists the messages of which the caller no
    longer has the lease. Giving a message back again changes nothing.
    """

    NAME = "give_back_messages"
    PATH = f"{MESSAGES}/nack"
    BODY = NackRequest

    def record(self, asked: Asked, mailbox: Mailbox, message_id: str) -> OutgoingRecord:
        """Return the record that gives the message back."""
        body = MessageNack(**_leased(asked, mailbox, message_id), reason=asked.body.reason)
        return body.record(**asked.origin)


class ExtendLease(LeaseOperation):
    """Set a new end for the lease of messages, `lease` seconds from now.

    `refused` lists the messages of which the caller no longer has the lease. A request that is repeated
    with the same idempotency key changes nothing.
    """

    NAME = "extend_lease"
    PATH = f"{MESSAGES}/extend"
    ANSWER = ExtendedAnswer
    BODY = ExtendRequest

    def record(self, asked: Asked, mailbox: Mailbox, message_id: str) -> OutgoingRecord:
        """Return the extension."""
        body = MessageExtension(**_leased(asked, mailbox, message_id), lease_ms=asked.body.lease * 1000)
        return body.record(ce_id=str(uuid.uuid5(asked.made, message_id)), **asked.origin)

    def document(self, asked: Asked, ends: LeaseEnds) -> dict[str, Any]:
        """Return the answer with the earliest end of the leases; None without a message."""
        keys = ["/".join((*mailbox, one)) for one in ends.done for mailbox in self._mailboxes(asked)]
        rows = [self.hub.live_view.get(MessageRow, key) for key in keys]
        found = [row.lease_until for row in rows if row is not None and row.lease_until is not None]
        return {**super().document(asked, ends), "deadline": iso_moment(min(found)) if found else None}
