"""Several messages acknowledged by one record, and conversations that a message opens (XP-06, XP-07)."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.fold import settle
from schemas.streams.mailboxes.mailbox_bodies import HandledMessage, MessagesHandled
from schemas.streams.mailboxes.message import Message
from schemas.streams.thread.threads import ThreadRow
from schemas.wire.record import OutgoingRecord
from tests.schemas.job_records import KEYRING, START_US, document_record, said
from tests.schemas.mailbox_records import (
    AT,
    HUB,
    PUMP,
    S_US,
    a_lease,
    an_ack,
    at,
    mailbox_of,
    post_at,
    refused,
    statuses,
)
from tests.schemas.stream_records import MAILBOX_KEY, known_stream, message, of_mailbox

PLACE = {"thread": "t1", "parent_thread": "t0", "root_thread": "t0", "on_behalf_of": "ann"}


def handled(*ids: str, lease: str = "l1", by: dict[str, Any] = PUMP, answer: str = "yes") -> OutgoingRecord:
    """The record that acknowledges these messages of a lease, each with an answer."""
    answers = {one: Message.model_validate(message(f"a-{one}", to="ann", body=answer)) for one in ids}
    return MessagesHandled(
        **AT, messages=[HandledMessage(message_id=one, request_id=lease, answers=[answers[one]]) for one in ids]
    ).record(**by)


def leased_mailbox(*ids: str) -> Entries:
    """A mailbox whose messages are leased by the request l1."""
    entries = mailbox_of(*ids)
    assert len(statuses(at(0, a_lease("l1", limit=9), entries))) == len(ids)
    return entries


@pytest.mark.requirement("ST-50")
def test_one_record_acknowledges_all_of_its_messages_once() -> None:
    entries = leased_mailbox("m1", "m2", "m3")
    first = at(S_US, handled("m1", "m2"), entries)
    assert (said(first), first.status_after) == (("accepted", None), "claimed")
    assert statuses(first) == {"m1": "claimed", "m2": "claimed"}
    assert said(at(S_US, handled("m1", "m2"), entries)) == ("duplicate", None)
    assert said(at(S_US, handled("m1", "m2", answer="no"), entries)) == ("rejected", "seq_conflict")
    # The others are still held, so that only two more can be leased.
    more = at(S_US, an_ack("m3", "l1"), entries)
    assert statuses(more) == {"m3": "claimed"}


@pytest.mark.requirement("ST-50")
@pytest.mark.parametrize("trouble", ["acked", "another lease", "another reader", "unknown"])
def test_a_record_acknowledges_none_if_it_may_not_acknowledge_one_of_its_messages(trouble: str) -> None:
    entries = leased_mailbox("m1", "m2")
    record = handled("m1", "m2")
    if trouble == "acked":
        at(S_US, an_ack("m2", "l1"), entries)
    elif trouble == "another lease":
        at(31 * S_US, a_lease("l2", limit=1, message_ids=["m2"]), entries)
    elif trouble == "another reader":
        record = handled("m1", "m2", by=HUB)
    else:
        record = handled("m1", "m9")
    before = dict(entries.stored())
    settled = at(32 * S_US, record, entries)
    assert refused(settled)[0] == "illegal_transition"
    assert (settled.changes, dict(entries.stored())) == ((), before)
    # By itself the other message can be acknowledged.
    assert said(at(32 * S_US, an_ack("m1", "l1"), entries)) == ("accepted", None)


@pytest.mark.requirement("ST-50")
@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"message_id": "m1", "request_id": "l1"}] * 2,
        [{"message_id": "m1"}],
        [{"message_id": "m1", "request_id": "l1", "more": 1}],
        [{"message_id": f"m{n}", "request_id": "l1"} for n in range(101)],
        "m1",
    ],
)
def test_other_lists_of_handled_messages_are_malformed(messages: Any) -> None:
    record = document_record(of_mailbox(messages=messages), "message.handled", key=MAILBOX_KEY)
    assert said(settle(record, known_stream(MAILBOX_KEY), KEYRING, Entries())) == ("rejected", "malformed")


def threads_of(settled: Settled) -> list[ThreadRow]:
    """The rows of conversations that have changed."""
    return [change.row for change in settled.changes if isinstance(change.row, ThreadRow)]


@pytest.mark.requirement("ST-51")
def test_a_message_that_opens_a_conversation_makes_its_row() -> None:
    entries = Entries()
    (row,) = threads_of(post_at(0, entries, "m1", **PLACE, opens_thread=True))
    assert (row.thread, row.parent_thread, row.root_thread) == ("t1", "t0", "t0")
    assert (row.opened_by, row.seen_by, row.on_behalf_of) == ("ann", "bo", "ann")
    assert (row.message_id, row.opened_at) == ("m1", START_US)
    assert threads_of(post_at(S_US, entries, "m2", **PLACE)) == []


@pytest.mark.requirement("ST-51")
def test_the_mark_of_an_opening_is_no_part_of_a_messages_content() -> None:
    entries = Entries()
    post_at(0, entries, "m1", **PLACE, opens_thread=True)
    for mark in ({}, {"opens_thread": True}):
        again = post_at(S_US, entries, "m1", **PLACE, **mark)
        assert (said(again), again.changes) == (("duplicate", None), ())
    assert said(post_at(S_US, entries, "m1", **{**PLACE, "thread": "t2"})) == ("rejected", "seq_conflict")


@pytest.mark.requirement("ST-51")
@pytest.mark.parametrize("missing", ["thread", "parent_thread", "root_thread"])
def test_a_message_without_a_place_in_the_tree_opens_no_conversation(missing: str) -> None:
    place = {name: value for name, value in PLACE.items() if name != missing}
    assert threads_of(post_at(0, Entries(), "m1", **place, opens_thread=True)) == []
