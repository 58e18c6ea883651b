"""The settling of messages that a pump has handled, with the answers of handlers as addressed messages.

A pump only supplies payloads. This module finds their recipients, threads and senders (XP-05 to XP-07), and
settles many messages with few records, and each answer once (XP-06).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from connectors.doors.http_api.pump.pump_models import Done, GivenAnswer
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.reactor.derived_records import XML_CONTENT, XML_DOOR, answer_record
from connectors.hub.services.conversations import Place, child_thread, thread_of
from connectors.hub.services.hub import Hub
from connectors.hub.services.log_appender import gather_all
from connectors.log.publisher import Append
from connectors.operations.rules.hub_policy import recipients_of
from connectors.plumbing.xml_payloads.huh import HUH_TAG, huh
from connectors.plumbing.xml_wire.documents import Faulty
from schemas.streams.mailboxes.mailbox_bodies import (
    ANSWERS_MOST,
    HANDLED_MOST,
    HandledMessage,
    MessageAck,
    MessageNack,
    MessagesHandled,
)
from schemas.streams.mailboxes.message import DEFAULT_REALM, Message, MessageRow, verified_message
from schemas.streams.principal.principals import SYSTEM
from schemas.streams.thread.threads import ThreadRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED, UNKNOWN_STREAM

_NAMESPACE: Final = uuid.UUID("8e0f5f6d-4f0a-5a3b-8a4c-3d1c5f7b9e21")


def _answers_to(hub: Hub, row: MessageRow, done: Done) -> list[Message]:
    """Return the handler's answers to a message, addressed. If they are too many or too large, a `<huh>`.

    Args:
        hub: The hub.
        row: The row of the leased message.
        done: The outcome and the answers, as the pump sent them.
    """
    answers = list(_answers(hub, row, done))
    size = sum(len(answer.body.encode("utf-8")) for answer in answers)
    limit = hub.settings.limits.payload_bytes
    if size <= limit and len(answers) <= ANSWERS_MOST:
        return answers
    what = f"{len(answers)} messages of {size} bytes; at most {ANSWERS_MOST} and {limit} bytes"
    fault = huh(f"the answer is too large: {what}", about_tag=row.kind, step="answer")
    return [_to_asker(hub, row, 0, HUH_TAG, fault.decode("utf-8"))]


def _answers(hub: Hub, row: MessageRow, done: Done) -> Iterator[Message]:
    if done.outcome == "huh":
        # A <huh> is never answered with a <huh>, because the exchange would never end.
        if row.kind != HUH_TAG and done.answers:
            yield _back_to_sender(hub, row, done.answers[0].body)
        return
    number = 0
    for answer in done.answers:
        for message in _addressed(hub, row, number, answer):
            yield message
            number += 1


def _addressed(hub: Hub, row: MessageRow, number: int, answer: GivenAnswer) -> list[Message]:
    """Return the messages of a payload: to the named recipient, all listeners of its tag, or the asker."""
    thread, listener = thread_of(hub.keyring, row), row.recipient
    place = place_of(hub, thread) or _place_of_itself(hub, row)
    most, chain = hub.settings.xml_pump.chain_most, _chain(hub, thread, row)
    if answer.to == place.asker and (row.hops or 0) < most:
        # Two that write to each other by name, or one to itself, stay in one place of the tree.
        return [_to_asker(hub, row, number, answer.kind, answer.body, hops=chain + 1)]
    try:
        names = recipients_of(hub, listener, answer.to, answer.kind, answer.namespace)
    except Faulty as fault:
        if answer.to is None:
            return [_to_asker(hub, row, number, answer.kind, answer.body)]
        if chain >= most and row.kind == HUH_TAG:
            return []
        body = huh(fault, about_tag=answer.kind, step=fault.step).decode("utf-8")
        where = {"thread": thread, "root_thread": place.root_thread}
        return [_message(hub, row, number, SYSTEM, listener, HUH_TAG, body, chain + 1, **where)]
    if chain >= most:
        if row.kind == HUH_TAG:
            # It asks again after a <huh>. Another <huh> would go on without an end.
            return []
        why = f"the chain of messages from listener to listener ended after {most} messages"
        expected = "a shorter chain, or a higher xml_pump.chain_most"
        body = huh(Faulty("routing", why, expected=expected), about_tag=answer.kind).decode("utf-8")
        return [_to_asker(hub, row, number, HUH_TAG, body, hops=chain)]
    return [
        _message(
            hub,
            row,
            number + place_in_list,
            listener,
            name,
            answer.kind,
            answer.body,
            None if row.hops is None else chain + 1,
            thread=child_thread(hub.keyring, thread, listener, name),
            parent_thread=thread,
            root_thread=place.root_thread,
            on_behalf_of=place.on_behalf_of,
        )
        for place_in_list, name in enumerate(names)
    ]


def _chain(hub: Hub, thread: str, row: MessageRow) -> int:
    """Return the number of messages of the chain up to `row`, by its place in the tree or its own count."""
    return max(_depth(hub, thread, hub.settings.xml_pump.chain_most), row.hops or 0)


def _depth(hub: Hub, thread: str, most: int) -> int:
    """Return how many messages of the chain led to this thread, the first one included; at most `most`."""
    depth, place = 0, place_of(hub, thread)
    while place is not None and depth < most:
        depth += 1
        place = None if place.parent_thread is None else place_of(hub, place.parent_thread)
    return depth


def _to_asker(hub: Hub, row: MessageRow, number: int, kind: str, body: str, hops: int | None = None) -> Message:
    """Return a message to the asker. `hops`: its place in the chain, None for that of an answer."""
    thread = thread_of(hub.keyring, row)
    place = place_of(hub, thread) or _place_of_itself(hub, row)
    question = _question(hub, row, thread, place.asker)
    return _message(
        hub,
        row,
        number,
        row.recipient,
        place.asker,
        kind,
        body,
        hops if hops is not None or question.hops is None else max(1, question.hops - 1),
        in_reply_to=question.message_id,
        thread=place.parent_thread or own_thread(question),
        root_thread=place.root_thread,
        on_behalf_of=place.on_behalf_of,
    )


def _question(hub: Hub, row: MessageRow, thread: str, asker: str) -> MessageRow:
    """Return the asker's message to which an answer replies; `row` itself if the asker's is not known any more.

    The listener may have asked others before it answers. It then handles their reply, which is about its own
    message, which is about the asker's.
    """
    found: MessageRow | None = row
    for _ in range(2 * hub.settings.xml_pump.chain_most):
        if found is None or (found.sender, found.recipient) == (asker, row.recipient):
            break
        # The answered message is in the mailbox of the sender of the answer, or of the listener itself.
        keys = (f"{DEFAULT_REALM}/{box}/{found.in_reply_to}" for box in (found.sender, found.recipient))
        found = next((one for key in keys if (one := hub.live_view.get(MessageRow, key)) is not None), None)
    if found is not None and found.sender == asker:
        return found
    return newest_question(hub, thread, asker, row.recipient) or row


def newest_question(hub: Hub, thread: str, asker: str, listener: str) -> MessageRow | None:
    """Return the newest message of a conversation from its asker to a listener, or None if none is known.

    `thread` is the thread by which the listener knows the conversation.
    """
    for key in reversed(hub.conversations.message_keys(thread)):
        row = hub.live_view.get(MessageRow, key)
        if row is not None and (row.sender, row.recipient) == (asker, listener):
            return row
    return None


def own_thread(question: MessageRow) -> str | None:
    """Return the thread that a sender at another door gave its message; None for a message of the pump."""
    return question.thread if question.root_thread is None else None


def _back_to_sender(hub: Hub, row: MessageRow, body: str) -> Message:
    """Return a fault as a message to the sender, on the sender's thread if it has one."""
    thread = row.parent_thread or own_thread(row)
    root = row.root_thread if thread is not None else None
    hops = _chain(hub, thread_of(hub.keyring, row), row) + 1
    place = {"thread": thread, "root_thread": root}
    return _message(hub, row, 0, row.recipient, row.sender, HUH_TAG, body, hops, **place)


def _message(
    hub: Hub,
    row: MessageRow,
    number: int,
    sender: str,
    to: str,
    kind: str,
    body: str,
    hops: int | None,
    **place: str | None,
) -> Message:
    message_id = str(uuid.uuid5(_NAMESPACE, f"{row.recipient}/{row.message_id}/{number}"))
    about: dict[str, Any] = {"priority": row.priority, "in_reply_to": row.message_id, "hops": hops, **place}
    if place.get("parent_thread") is not None:
        about["opens_thread"] = opens_thread(hub, place["thread"], message_id)
    return verified_message(message_id, sender, to, kind, body, XML_CONTENT, **about)


def opens_thread(hub: Hub, thread: str | None, message_id: str) -> bool | None:
    """Return True if a message opens the conversation `thread`, else None: the field `opens_thread` of it.

    It does if the view `registry_threads` has no such thread, or has it from this message.
    """
    row = None if thread is None else hub.live_view.get(ThreadRow, thread)
    return True if row is None or row.message_id == message_id else None


def place_of(hub: Hub, thread: str) -> Place | None:
    """Return the place of a thread in the tree of conversations, or None for an unknown thread.

    `thread` is the thread's id. The place comes from memory or, for an older thread, from the view
    `registry_threads`.
    """
    return hub.conversations.place(thread, hub.live_view.get(ThreadRow, thread))


def _place_of_itself(hub: Hub, row: MessageRow) -> Place:
    """Return the place of a message whose thread is not known any more; its sender is the asker."""
    root = row.root_thread or thread_of(hub.keyring, row)
    return Place(row.sender, row.recipient, row.parent_thread, root, row.on_behalf_of or row.sender)


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
            found = _Handled(done, _answers_to(hub, row, done))
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
