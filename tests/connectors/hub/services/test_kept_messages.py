"""The messages in a gateway's memory: many, and none for Python's collector to walk (decision 0056)."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import orjson
import pytest

from connectors.hub.live.live_store import LiveRows
from connectors.hub.live.settled_feed import SettledFeed
from connectors.hub.services import mailbox_waits, mailboxes
from connectors.hub.services.conversations import Conversations
from connectors.hub.services.mailbox_waits import HandedMessages, same_request
from connectors.hub.services.mailboxes import MailboxIndex
from connectors.operations.principals.dead_messages import newest_dead
from connectors.operations.principals.principal_operations import cleared_count
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim, MailboxClearing, MailboxLease, MessageNack
from schemas.streams.mailboxes.message import Message, MessageRow
from schemas.wire.record import OutgoingRecord
from tests.connectors.hub.live.local_stores import empty_state
from tests.schemas.stream_records import as_read

KEYRING = Keyring({"test": b"k" * 32}, "test")
MESSAGES = 500


def message(number: int) -> Message:
    return Message.model_validate(
        {
            "message_id": f"message-{number}",
            "from": "planner",
            "to": f"agent-{number % 3}",
            "kind": "note",
            "body": '{"text": "step 7"}',
        }
    )


def settled_into(index: MailboxIndex) -> Callable[[OutgoingRecord], None]:
    """A log of one partition whose changes go into the index."""
    state, offsets = empty_state(KEYRING), itertools.count()
    index.load([])

    def settle(outgoing: OutgoingRecord) -> None:
        assert (
            getattr(state.apply(as_read(outgoing, next(offsets)), index.changed), "verdict", "") == "accepted"
        )

    return settle


def drained(recipient: str, number: int) -> OutgoingRecord:
    return MailboxClaim(to=recipient, request_id=f"drain-{number}", limit=10).record(
        door="http", principal=recipient
    )


def test_of_the_final_messages_the_newest_are_kept_in_whatever_mailbox_they_are(monkeypatch):
    monkeypatch.setattr(mailboxes, "FINAL_MESSAGES", 2)
    index = MailboxIndex()
    settle = settled_into(index)
    for number in range(4):
        settle(message(number).record(door="http", principal="planner"))
        if number != 1:  # which waits, and so is kept
            settle(drained(f"agent-{number % 3}", number))
    kept = {name: index.messages(("default", name)) for name in ("agent-0", "agent-1", "agent-2")}
    assert kept == {"agent-0": ["message-3"], "agent-1": ["message-1"], "agent-2": ["message-2"]}
    settle(drained("agent-1", 9))
    assert index.messages(("default", "agent-2")) == []
    assert index.messages(("default", "agent-0")) == ["message-3"]
    assert index.mailbox_of("message-0") == ("default", "agent-0")


@pytest.mark.requirement("DL-11")
def test_dead_messages_and_their_replays_are_known_by_mailbox_until_they_are_forgotten(monkeypatch):
    monkeypatch.setattr(mailboxes, "FINAL_MESSAGES", 3)
    index = MailboxIndex()
    settle = settled_into(index)
    box, by = ("default", "agent-0"), {"door": "http", "principal": "agent-0"}
    for number in (0, 3, 6):
        settle(message(number).record(door="http", principal="planner"))
    for number in (0, 3):
        lease_id = f"lease-{number}"
        settle(
            MailboxLease(realm=box[0], to=box[1], request_id=lease_id, limit=1, attempts_most=1).record(**by)
        )
        settle(
            MessageNack(
                realm=box[0], to=box[1], message_id=f"message-{number}", request_id=lease_id, reason="no disk"
            ).record(**by)
        )
    assert index.dead_of(box) == ["message-3", "message-0"]
    assert index.dead_count(box) == 2
    replay = message(9).model_copy(update={"replay_of": "message-0"})
    settle(replay.record(door="http", principal="operator"))
    assert index.replays(box, "message-0") == ["message-9"] and index.replays(box, "message-3") == []
    settle(drained("agent-0", 1))
    # Two dead and two drained ones are one too many.
    assert index.dead_of(box) == ["message-3"]
    for number in (12, 15, 18):
        settle(message(number).record(door="http", principal="planner"))
        settle(drained("agent-0", number))
    assert index.dead_of(box) == index.replays(box, "message-0") == []
    assert index.dead_count(box) == 0


@pytest.mark.requirement("ST-70")
def test_dead_messages_are_listed_also_when_many_others_have_ended_since():
    rows, offsets = LiveRows(), itertools.count()
    rows._state = empty_state(KEYRING)

    def settle(outgoing: OutgoingRecord) -> None:
        rows._state.apply(as_read(outgoing, next(offsets)), lambda change: None)

    by = {"door": "http", "principal": "agent-0"}
    for number in (0, 3, 6):
        settle(message(number).record(door="http", principal="planner"))
        settle(MailboxLease(to="agent-0", request_id=f"lease-{number}", limit=1, attempts_most=1).record(**by))
        settle(
            MessageNack(
                to="agent-0", message_id=f"message-{number}", request_id=f"lease-{number}", reason="no disk"
            ).record(**by)
        )
    for number in (1, 2):
        settle(message(number).record(door="http", principal="planner"))
        settle(drained(f"agent-{number}", number))
    found = orjson.loads(orjson.dumps(newest_dead(rows, 2, 10_000)))
    assert [one["message_id"] for one in found["messages"]] == ["message-3", "message-6"]
    assert found["total"] == 3 and found["messages"][0]["body"] == '{"text": "step 7"}'
    one = orjson.loads(orjson.dumps(newest_dead(rows, 2, 1)))
    assert ([one["message_id"] for one in one["messages"]], one["left"]) == (["message-6"], 1)


@pytest.mark.requirement("DL-11")
def test_dead_messages_that_are_loaded_after_newer_ones_are_in_the_order_of_their_ends():
    state, offsets, rows = empty_state(KEYRING), itertools.count(), {}
    by = {"door": "http", "principal": "agent-0"}
    for number in (0, 3, 6):
        lease_id, name = f"lease-{number}", f"message-{number}"
        for record in (
            message(number).record(door="http", principal="planner"),
            MailboxLease(to="agent-0", request_id=lease_id, limit=1, attempts_most=1).record(**by),
            MessageNack(to="agent-0", message_id=name, request_id=lease_id, reason="no disk").record(**by),
        ):
            state.apply(as_read(record, next(offsets)), lambda change: rows.update({change.key: change}))
    index = MailboxIndex()
    dead = [change for change in rows.values() if isinstance(change.row, MessageRow)]
    index.changed(dead[2])
    index.load([change.row for change in dead[:2]])
    assert index.dead_of(("default", "agent-0")) == ["message-6", "message-3", "message-0"]


@pytest.mark.long
def test_what_is_kept_of_a_message_is_nothing_that_the_collector_walks():
    state, feed, index = empty_state(KEYRING), SettledFeed(), MailboxIndex()
    conversations = Conversations(KEYRING)
    index.load([])
    offsets = itertools.count()

    def changed(change: AppliedChange) -> None:
        index.changed(change)
        conversations.changed(change)

    def settle(outgoing: OutgoingRecord) -> None:
        settled = state.apply(as_read(outgoing, next(offsets)), changed)
        assert settled is not None
        assert settled.verdict == "accepted"
        feed.extend([settled])

    def exchange(numbers: range) -> int:
        for number in numbers:
            posted = message(number)
            settle(posted.record(door="http", principal="planner"))
            settle(drained(posted.recipient, number))
            assert index.handed(("default", posted.recipient), f"drain-{number}") == [posted.message_id]
        gc.collect()
        return len(gc.get_objects())

    # The first make the mailboxes and fill the caches.
    before = exchange(range(20))
    walked = exchange(range(20, 20 + MESSAGES)) - before
    assert len(index.messages(("default", "agent-0"))) > MESSAGES / 4
    assert walked < MESSAGES / 10


@pytest.mark.requirement("DL-02")
def test_messages_that_come_while_the_index_loads_are_followed_in_the_order_of_posting():
    state, index, offsets = empty_state(KEYRING), MailboxIndex(), itertools.count()
    old, new = [], []
    for number, changed in ((0, old.append), (3, old.append), (6, index.changed), (9, new.append)):
        posting = message(number).record(door="http", principal="planner")
        state.apply(as_read(posting, next(offsets)), changed)
    rows = [change.row for change in old if isinstance(change.row, MessageRow)]
    index.load(rows)
    for change in new:
        index.changed(change)
    assert index.posted_after(("default", "agent-0"), rows[-1].posted_at) == ["message-6", "message-9"]
    assert len(index.posted_after(("default", "agent-0"), 0)) == 4


@pytest.mark.requirement("ST-70")
def test_a_clearing_is_counted_without_a_look_at_what_ended_before(monkeypatch):
    index, rows = MailboxIndex(), LiveRows()
    index.load([])
    state, offsets = empty_state(KEYRING), itertools.count()
    rows._state = state

    def settle(outgoing: OutgoingRecord) -> int:
        offset = next(offsets)
        settled = state.apply(as_read(outgoing, offset), index.changed)
        assert settled is not None and settled.verdict == "accepted"
        return settled.logged_at_us

    for number in range(60):
        settle(message(number).record(door="http", principal="planner"))
    for turn in range(2):
        settle(drained("agent-0", turn))
    earlier = MailboxClearing(to="agent-1", request_id="first").record(door="http", principal="operator")
    at_us = settle(earlier)
    assert cleared_count(rows, ("default", "agent-1"), [], at_us) == 20
    for number in (60, 63, 66):
        settle(message(number).record(door="http", principal="planner"))
    waiting = index.waiting(("default", "agent-0"))
    taken, place = state.take()
    state._store.advance(state.place, place, taken.entry_changes(), taken.row_changes())
    state.flushed(taken, place)
    settle(message(69).record(door="http", principal="planner"))
    at_us = settle(MailboxClearing(to="agent-0", request_id="second").record(door="http", principal="operator"))
    reads: list[str] = []
    find = state.find
    monkeypatch.setattr(state, "find", lambda view, key: reads.append(key) or find(view, key))
    assert cleared_count(rows, ("default", "agent-0"), waiting, at_us) == 4
    assert len(reads) <= 10


@pytest.mark.requirement("ST-94")
def test_the_oldest_requests_are_forgotten(monkeypatch):
    monkeypatch.setattr(mailbox_waits, "_REQUESTS", 3)
    handed, bo = HandedMessages(), ("default", "bo")
    for number in range(5):
        handed.note(bo, f"request-{number}-00", f"message-{number}")
    found = [handed.earlier([bo], same_request(f"request-{number}-ff")) for number in range(5)]
    assert found == [None, None, *((bo, f"request-{number}-00") for number in (2, 3, 4))]
    assert len(handed._handed) == len(handed._asked) == 3
    assert handed.of(bo, "request-4-00") == ["message-4"]
