"""Random records about mailboxes: messages, claims and leases by several doors, and the ends of leases.

Nothing here knows the fold. The latest messages and leases are remembered, so that much of what is sent about a
message finds it there, and the rest is left to chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from schemas.streams.mailboxes import mailbox_bodies as bodies
from schemas.streams.mailboxes.mailbox_bodies import (
    LIMIT_MOST,
    HandledMessage,
    MailboxClaim,
    MailboxClearing,
    MailboxLease,
    MessageDue,
    MessagesHandled,
)
from schemas.streams.mailboxes.message import Message
from tests.random_records import DIGESTS
from tests.raw_records import Raw, raw

_TIMES: tuple[dict[str, object], ...] = (
    {"expires_at": "2020-02-29T12:00:00.5Z"},
    {"expires_at": "2999-12-31T23:59:59Z"},
    {"expires_in_ms": 1},
    {"expires_in_ms": 2000, "deliver_after_ms": 200},
    {"deliver_after_ms": 1},
    {"deliver_after_ms": 86_400_000},
)


class _Mailbox:
    """The latest messages of a mailbox, the leases and holders that may have got them, the latest extension."""

    def __init__(self, agent: str) -> None:
        self.at = {"to": agent}
        self.messages: list[str] = []
        self.leased: list[tuple[str, str, dict[str, str]]] = []
        self.posted: Raw | None = None
        self.extended: tuple[tuple[str, str, str, str], str, dict[str, str]] | None = None


class RandomMailboxes:
    """Mailboxes of these recipients. `draw` decides; `senders` write to them."""

    def __init__(self, draw: random.Random, recipients: Sequence[str], senders: Sequence[str]) -> None:
        self._draw, self._senders = draw, senders
        self._mailboxes = [_Mailbox(agent) for agent in recipients]

    def message(self) -> Raw:
        """A message, now and then the newest one of its mailbox once more."""
        mailbox = self._draw.choice(self._mailboxes)
        if mailbox.posted is not None and self._draw.random() < 0.1:
            return mailbox.posted
        body = {
            "message_id": f"message-{self._draw.randrange(400)}",
            "from": self._draw.choice(self._senders),
            "to": mailbox.at["to"],
            "kind": "ask",
            "body": self._draw.choice(['{"n": 1}', "plain text", "☃"]),
            "priority": self._draw.choice(["low", "normal", "high"]),
            "from_task": self._draw.choice([None, None, "task-1"]),
            **self._draw.choice([*[{}] * 6, *_TIMES]),
            "in_reply_to": self._draw.choice([None, None, f"message-{self._draw.randrange(400)}"]),
            "thread": self._draw.choice([None, None, "thread-1"]),
            **self._draw.choice([{}, {}, self._opening(mailbox)]),
            "replay_of": self._draw.choice([*[None] * 4, f"message-{self._draw.randrange(400)}"]),
        }
        if self._draw.random() < 0.1:
            body["blob"] = {"digest": self._draw.choice(DIGESTS), "bytes": 1, "content_type": "image/png"}
        mailbox.messages = [*mailbox.messages[-5:], body["message_id"]]
        mailbox.posted = raw(Message.model_validate(body).record(door="http", principal=body["from"]))
        return mailbox.posted

    def _opening(self, mailbox: _Mailbox) -> dict[str, object]:
        """The place of a conversation with this mailbox, which the message opens."""
        thread = f"of-{mailbox.at['to']}-{self._draw.randrange(20)}"
        mark = self._draw.choice([{}, {"opens_thread": True}])
        return {"thread": thread, "parent_thread": "thread-0", "root_thread": "thread-0", **mark}

    def hand_out(self) -> Raw:
        """A claim or a lease, often one that was made before; rarely all is cleared."""
        mailbox, by = self._draw.choice(self._mailboxes), self._consumer()
        request, limit = f"request-{self._draw.randrange(200)}", self._draw.choice([1, 1000, 1000])
        roll = self._draw.random()
        if roll < 0.05:
            return raw(MailboxClearing(**mailbox.at, request_id=request).record(**by))
        if roll < 0.1:
            # Mostly open again, so that most of what is sent gets in.
            gate = bodies.MailboxOpening if self._draw.random() < 0.7 else bodies.MailboxClosing
            return raw(gate(**mailbox.at, request_id=request).record(ce_id=f"gate-{request}", **by))
        if roll < 0.25:
            named = self._draw.sample(mailbox.messages, min(2, len(mailbox.messages)))
            if named and self._draw.random() < 0.6:
                # A door claims what it has handed out, or a reply that nobody else may hold.
                if_unread = self._draw.choice([None, True])
                return raw(
                    MailboxClaim(
                        **mailbox.at,
                        request_id=request,
                        message_ids=list(named),
                        if_unread=if_unread,
                        limit=LIMIT_MOST,
                    ).record(**by)
                )
            bytes_most = self._draw.choice([None, 1, 20])
            return raw(
                MailboxClaim(**mailbox.at, request_id=request, limit=limit, bytes_most=bytes_most).record(**by)
            )
        handed = [(message_id, request, by) for message_id in mailbox.messages]
        mailbox.leased = [*mailbox.leased, *handed][-12:]
        # Some run out before the next record is logged, some while the log is written, some never.
        lease_ms = self._draw.choice([1, 200, 200, 2000, 86_400_000])
        conditions = self._draw.choice(
            [
                *({}, {}, {"held_most": 2}, {"per_minute": 3}, {"from_closed": True}),
                *({"attempts_most": 1}, {"attempts_most": 2}, {"attempts_most": 5}),
                *({"bytes_most": 1}, {"bytes_most": 16}),
            ]
        )
        return raw(
            MailboxLease(**mailbox.at, request_id=request, limit=limit, lease_ms=lease_ms, **conditions).record(
                **by
            )
        )

    def handed_out(self) -> Raw:
        """Return a next record for one message, mostly under a lease that it may have been handed out by."""
        mailbox = self._draw.choice(self._mailboxes)
        unheard = ("message-0", "request-0", self._consumer())
        known = mailbox.leased[-4:] if self._draw.random() < 0.5 else mailbox.leased
        message_id, request, by = self._draw.choice([*known, unheard])
        if mailbox.extended is not None and self._draw.random() < 0.2:
            return self._extension(mailbox)
        about, roll = {**mailbox.at, "message_id": message_id, "request_id": request}, self._draw.random()
        if roll < 0.1:
            return raw(bodies.MessageAck(**about).record(**by))
        if roll < 0.2:
            # Often two of one lease, of which the holder may have lost one.
            several = {
                held: HandledMessage(message_id=held, request_id=by_request)
                for held, by_request, who in (*known[-2:], (message_id, request, by))
                if who == by
            }
            return raw(MessagesHandled(**mailbox.at, messages=list(several.values())).record(**by))
        if roll < 0.45:
            reason, is_no_attempt = (
                self._draw.choice(["", "no disk", "☃"]),
                self._draw.choice([None, None, True]),
            )
            return raw(bodies.MessageNack(**about, reason=reason, is_no_attempt=is_no_attempt).record(**by))
        if roll < 0.6:
            return raw(bodies.MessageReclaim(**about).record(**by))
        if roll < 0.8:
            mailbox.extended = (about, f"extension-{self._draw.getrandbits(40):x}", by)
            return self._extension(mailbox)
        if roll < 0.87:
            return raw(MessageDue(**mailbox.at, message_id=message_id).record(ce_id=f"due-{message_id}", **by))
        make = self._draw.choice([bodies.MessageReading, bodies.MessageReading, bodies.MessageExpiry])
        return raw(make(**mailbox.at, message_id=message_id).record(**by))

    def _extension(self, mailbox: _Mailbox) -> Raw:
        """The newest extension, perhaps once more, with the same content or with another."""
        assert mailbox.extended is not None
        about, ce_id, by = mailbox.extended
        # Some shorten the lease.
        lease_ms = self._draw.choice([1, 2000, 2000])
        return raw(bodies.MessageExtension(**about, lease_ms=lease_ms).record(ce_id=ce_id, **by))

    def _consumer(self) -> dict[str, str]:
        # A lease holds its messages and not their mailbox, so consumers at several doors lease at once.
        return {"door": self._draw.choice(["xml", "http", "http", "mcp"]), "principal": "consumer"}
