"""Marks messages as read, for the HTTP routes and the agent MCP tools.

A mark is one record for each message. Its id follows from the principal and the message, so a repeated mark has
no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Unpack

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.serving.identities import Origin
from schemas.streams.mailboxes.mailbox_bodies import MessageReading
from schemas.streams.mailboxes.message import CLAIMED, MESSAGE_PENDING, READ, MessageRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.moments import has_come
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED

# The states of messages that a recipient sees; expired, cleared and dead messages are hidden.
_SHOWN: Final = MESSAGE_PENDING | {READ, CLAIMED}


@dataclass(frozen=True)
class ReadMarks:
    """The result of a request to mark messages as read: four lists of message ids, each id in one list.

    The lists keep the order of the request.

    Attributes:
        marked: Marked by this request.
        read_before: Marked or taken before.
        not_marked: Leased through another interface, or ended meanwhile in another way.
        unknown: Not in the mailboxes, or expired.
    """

    marked: list[str]
    read_before: list[str]
    not_marked: list[str]
    unknown: list[str]


def is_shown(row: MessageRow, now_us: float) -> bool:
    """Return whether the recipient may see the message: it is waiting, leased, read or taken.

    Expired, cleared and dead messages are hidden. `now_us` is the present time in microseconds since 1970 UTC.
    """
    if row.status not in _SHOWN:
        return False
    return not (row.status in MESSAGE_PENDING and row.expires_at and has_come(row.expires_at, int(now_us)))


def is_read(row: MessageRow) -> bool:
    """Return whether a message was marked as read or taken by a drain.

    False means that the message is waiting or leased. Call this function only for a message for which
    `is_shown` is True; the result for any other message has no meaning.
    """
    return row.status not in MESSAGE_PENDING


class MarkPlan(NamedTuple):
    """The ids that a request wants to mark as read, the rows of those that are shown, and the unread ones."""

    wanted: Iterable[str]
    rows: Mapping[str, MessageRow]
    unread: Sequence[str]


def plan_marks(hub: Hub, mailboxes: Iterable[Mailbox], message_ids: Iterable[str]) -> MarkPlan:
    """Return which messages to mark as read.

    Args:
        hub: The hub.
        mailboxes: The mailboxes that the principal owns. Messages in other mailboxes count as unknown.
        message_ids: The ids of the messages. An id that occurs twice counts once.
    """
    boxes, wanted, now_us = list(mailboxes), dict.fromkeys(message_ids), hub.log_clock.now_us()
    rows: dict[str, MessageRow] = {}
    for message_id in wanted:
        for realm, recipient in boxes:
            row = hub.live_view.get(MessageRow, f"{realm}/{recipient}/{message_id}")
            if row is not None and is_shown(row, now_us):
                rows.setdefault(message_id, row)
    return MarkPlan(wanted, rows, [message_id for message_id, row in rows.items() if not is_read(row)])


def mark_records(plan: MarkPlan, **origin: Unpack[Origin]) -> list[OutgoingRecord]:
    """Return the records of a plan, one for each unread message."""
    found = (plan.rows[one] for one in plan.unread)
    return [
        MessageReading(realm=row.realm, to=row.recipient, message_id=row.message_id).record(**origin)
        for row in found
    ]


def marks_of(plan: MarkPlan, settled: Iterable[SettledRecord]) -> ReadMarks:
    """Return the ids by their result, from the settled records of a plan."""
    verdicts = {one: found.verdict for one, found in zip(plan.unread, settled, strict=True)}
    return ReadMarks(
        marked=[one for one in plan.unread if verdicts[one] == ACCEPTED],
        read_before=[one for one in plan.rows if verdicts.get(one) not in (ACCEPTED, REJECTED)],
        not_marked=[one for one in plan.unread if verdicts[one] == REJECTED],
        unknown=[one for one in plan.wanted if one not in plan.rows],
    )


async def mark_read(
    hub: Hub, mailboxes: Iterable[Mailbox], message_ids: Iterable[str], **origin: Unpack[Origin]
) -> ReadMarks:
    """Mark messages as read, wait until all marks are settled, and return the ids by their result.

    The arguments are those of `plan_marks`, and door and principal of the records.

    Raises:
        BackboneUnreachable: Kafka is unreachable, or a mark was not settled in time. Some marks may have been
            settled. The call can be repeated.
    """
    plan = plan_marks(hub, mailboxes, message_ids)
    return marks_of(plan, await hub.appender.settle_all(mark_records(plan, **origin)))
