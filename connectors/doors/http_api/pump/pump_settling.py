"""Settles the messages that a pump has handled: few records for many messages, and each answer once (XP-06)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from connectors.doors.http_api.pump.pump_answers import answers_to
from connectors.doors.http_api.pump.pump_models import Done
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.reactor.xml_records import XML_DOOR, answer_record
from connectors.hub.services.hub import Hub
from connectors.hub.services.log_appender import gather_all
from connectors.log.publisher import Append
from schemas.streams.mailboxes.mailbox_bodies import (
    ANSWERS_MOST,
    HANDLED_MOST,
    HandledMessage,
    MessageAck,
    MessageNack,
    MessagesHandled,
)
from schemas.streams.mailboxes.message import DEFAULT_REALM, Message, MessageRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED, UNKNOWN_STREAM

NACK: Final = "nack"
_Result = tuple[str, str | None]
"""The verdict on the outcome of a message, and the reason of a rejection."""


class _Handled(NamedTuple):
    """A message whose handler has ended, with the addressed answers."""

    done: Done
    answers: list[Message]

    @property
    def size(self) -> int:
        """The length of all answers in bytes, without their envelopes."""
        return sum(len(answer.body.encode("utf-8")) for answer in self.answers)


async def settle_done(hub: Hub, outcomes: Sequence[Done], principal: str) -> list[dict[str, Any]]:
    """Settle messages by their outcome, and return the verdict on each, in the same order, as JSON.

    The messages of one listener are acknowledged together. If one of them cannot be, because its lease is no
    longer valid, each of them is acknowledged by itself. The answers are posted after an accepted
    acknowledgement. If this gateway fails before that, the reactor posts them.

    Args:
        hub: The hub.
        outcomes: The outcomes and the answers, as the pump sent them.
        principal: The principal of the pump.

    Raises:
        BackboneUnreachable: Kafka is unreachable. Some messages may have been settled.
        ApiError: 413 if Kafka takes no record of this size.
    """
    results: dict[int, _Result] = {}
    handled: dict[str, list[tuple[int, _Handled]]] = {}
    nacks: list[tuple[int, OutgoingRecord]] = []
    for place, done in enumerate(outcomes):
        row = hub.live_view.get(MessageRow, f"{DEFAULT_REALM}/{done.listener}/{done.message_id}")
        if row is None:
            results[place] = (REJECTED, UNKNOWN_STREAM)
        elif done.outcome == NACK:
            nacks.append((place, _nack(done, principal)))
        else:
            found = _Handled(done, answers_to(hub, row, done))
            handled.setdefault(done.listener, []).append((place, found))
    groups = [
        group
        for of_listener in handled.values()
        for group in _groups(of_listener, hub.settings.limits.payload_bytes)
    ]

    async def settle_group(group: list[tuple[int, _Handled]]) -> None:
        found = await _settled(hub, [one for _, one in group], principal)
        results.update(zip((place for place, _ in group), found, strict=True))

    async def settle_nack(place: int, record: OutgoingRecord) -> None:
        results[place] = _result(await hub.appender.settle(record))

    await gather_all([*map(settle_group, groups), *(settle_nack(*one) for one in nacks)])
    return [
        {"message_id": done.message_id, "verdict": results[place][0], "reason": results[place][1]}
        for place, done in enumerate(outcomes)
    ]


def _groups(handled: list[tuple[int, _Handled]], limit_bytes: int) -> Iterator[list[tuple[int, _Handled]]]:
    """Divide the messages of a listener so that each record stays within the limits of one acknowledgement."""
    group: list[tuple[int, _Handled]] = []
    size, answers, names = 0, 0, set[str]()
    for place, one in handled:
        is_full = (
            size + one.size > limit_bytes
            or answers + len(one.answers) > ANSWERS_MOST
            or len(group) == HANDLED_MOST
            or one.done.message_id in names
        )
        if group and is_full:
            yield group
            group, size, answers, names = [], 0, 0, set()
        group.append((place, one))
        size, answers = size + one.size, answers + len(one.answers)
        names.add(one.done.message_id)
    if group:
        yield group


async def _settled(hub: Hub, group: Sequence[_Handled], principal: str) -> list[_Result]:
    """Acknowledge messages of one listener: together, or one by one if that is rejected."""
    settled = await _acknowledged(hub, group, principal)
    if settled.verdict != REJECTED or len(group) == 1:
        return [_result(settled)] * len(group)
    alone = await gather_all(_acknowledged(hub, [one], principal) for one in group)
    return [_result(one) for one in alone]


async def _acknowledged(hub: Hub, group: Sequence[_Handled], principal: str) -> SettledRecord:
    """Append the acknowledgement and, if it is accepted, the answers. Return the settled acknowledgement."""
    record, answers = _ack(group, principal), [answer for one in group for answer in one.answers]
    if not answers:
        return await hub.appender.settle(record)
    hub.own_answers.begin(record.ce_id)
    appends: list[Append] | None = None
    try:
        settled = await hub.appender.settle(record)
        if settled.verdict == ACCEPTED:
            appends = await _posted(hub, answers, group[0].done.listener)
        return settled
    finally:
        hub.own_answers.end(record.ce_id, appends)


async def _posted(hub: Hub, answers: Sequence[Message], listener: str) -> list[Append] | None:
    """Append the answers. None if Kafka is unreachable: then they are left to the reactor."""
    try:
        return [await hub.appender.append(answer_record(answer, listener)) for answer in answers]
    except (BackboneUnreachable, TimeoutError):
        return None


def _ack(group: Sequence[_Handled], principal: str) -> OutgoingRecord:
    listener = group[0].done.listener
    handled = [
        HandledMessage(message_id=done.message_id, request_id=done.request_id, answers=answers or None)
        for done, answers in group
    ]
    if len(handled) == 1:
        return MessageAck(to=listener, **vars(handled[0])).record(door=XML_DOOR, principal=principal)
    return MessagesHandled(to=listener, messages=handled).record(door=XML_DOOR, principal=principal)


def _nack(done: Done, principal: str) -> OutgoingRecord:
    body = MessageNack(
        to=done.listener,
        message_id=done.message_id,
        request_id=done.request_id,
        reason=done.reason,
        is_no_attempt=True,
    )
    return body.record(door=XML_DOOR, principal=principal)


def _result(settled: SettledRecord) -> _Result:
    return settled.verdict, settled.reason
