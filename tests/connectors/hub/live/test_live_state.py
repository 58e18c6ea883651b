"""The state of the live view over its store, without Kafka: written at any moment, killed at any other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.hub.live import live_changes
from connectors.hub.live.live_changes import OVERHEAD_BYTES
from connectors.hub.live.live_state import LiveState
from schemas.fold.stream_kind import STOPPED
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring
from schemas.state_store.ended_lists import WHOLE, Span
from schemas.state_store.gateway_store import GatewayStore
from schemas.streams.agents.agent_registry import (
    AgentJoined,
    AgentKeyRow,
    AgentStopped,
    ParticipantRow,
)
from schemas.streams.fold import VIEWS
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim, MailboxClearing
from schemas.streams.mailboxes.message import Message, MessageBodyRow, MessageRow
from schemas.wire.record import OutgoingRecord, Record
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.live.local_stores import entries_of, place_at, rows_of
from tests.random_log import trouble
from tests.schemas.hub_records import public_key
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.signing import key_id_of

KEYRING = Keyring({"test": b"k" * 32}, "test")
SECOND_US = 1_000_000
STREAM = "mailbox/default/ann"


def written(state: LiveState, store: GatewayStore) -> None:
    """Write the changes of a state to its store."""
    taken, place = state.take()
    store.advance(state.place, place, taken.entry_changes(), taken.row_changes())
    state.flushed(taken, place)


def log_of_trouble(count: int, seed: int) -> list[Record]:
    """Records of one partition with every kind of trouble, a second apart."""
    found = []
    for offset, sent in enumerate(trouble(count, KEYRING, seed)):
        names = tuple("".join(name) for name, _ in sent.headers)
        values = tuple(value for _, value in sent.headers)
        at_us = 1_795_000_000 * SECOND_US + offset * SECOND_US
        found.append(Record("t", 0, offset, at_us, sent.key, sent.value, names, values))
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GatewayStore]:
    """A new store at the log's beginning."""
    made = GatewayStore(tmp_path / "store")
    made.finish_load(place_at({0: 0}))
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.requirement("ST-30")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_state_that_is_written_and_lost_at_any_moment_is_that_of_the_whole_log(store, monkeypatch, seed):
    monkeypatch.setattr(live_changes, "VALUES_CACHED", 3)
    records, draw = log_of_trouble(1200, seed), random.Random(seed)
    state, folded, lost = LiveState(KEYRING, store), FoldedLog(KEYRING), 0
    for record in records:
        folded.add(record)
    at, taken = 0, None
    while at < len(records):
        found = state.apply(records[at], lambda change: None)
        assert found is not None
        assert found.verdict == folded.settled[0, at].verdict, at
        at += 1
        # Other records come between the take and the write.
        if taken is None and draw.random() < 0.1:
            taken = state.take()
        elif taken is not None and draw.random() < 0.2:
            store.advance(state.place, taken[1], taken[0].entry_changes(), taken[0].row_changes())
            state.flushed(*taken)
            taken = None
        elif draw.random() < 0.02:
            # As after a kill: what was not written is lost, and is read from the log again.
            state, taken, before = LiveState(KEYRING, store), None, at
            at = state.place.offsets[0]
            lost += before - at
    if taken is not None:
        store.advance(state.place, taken[1], taken[0].entry_changes(), taken[0].row_changes())
        state.flushed(*taken)
    assert lost > 100
    assert entries_of(state) == folded.entries
    expected = {name: {key: row[1:] for key, row in rows.items()} for name, rows in folded.rows.items()}
    assert rows_of(state) == expected
    for view, row_type in VIEWS.items():
        assert_lists_are_those_of_the_rows(state, row_type, [row for _, row in expected[view].values()])
    written(state, store)
    for view, row_type in VIEWS.items():
        assert_lists_are_those_of_the_rows(state, row_type, [row for _, row in expected[view].values()])


def assert_lists_are_those_of_the_rows(state: LiveState, row_type: type[Row], rows: list[Row]) -> None:
    """Compare the live rows and each list of ended rows with the rows of a plain fold."""
    assert sorted(row.key for row in state.live(row_type.VIEW)) == sorted(
        row.key for row in rows if row.is_live
    )
    ended: dict[str, list[Row]] = {}
    for row in rows:
        for listed in row.lists if not row.is_live and row.ORDER else ():
            ended.setdefault(listed, []).append(row)
    for listed, known in ended.items():
        known.sort(key=lambda row: (getattr(row, row.ORDER), row.key), reverse=True)
        middle, old = known[len(known) // 2], known[-1 - len(known) // 4]
        part = Span(getattr(old, old.ORDER), (getattr(middle, middle.ORDER), middle.key))
        within = [row for row in known[len(known) // 2 + 1 :] if getattr(row, row.ORDER) >= part.since]
        assert state.oldest_ended(row_type.VIEW, listed) == known[-1]
        for span, expected in ((WHOLE, known), (part, within)):
            assert list(state.newest_ended(row_type.VIEW, listed, span)) == expected
            assert state.count_ended(row_type.VIEW, listed, span) == len(expected)
    assert state.count_ended(row_type.VIEW, "no such list", WHOLE) == 0


def message(number: int) -> OutgoingRecord:
    said = {"message_id": f"m{number}", "from": "planner", "to": "bo", "kind": "note", "body": f"text {number}"}
    return Message.model_validate(said).record(door="http", principal="planner")


@pytest.mark.requirement("ST-31")
def test_a_finished_message_leaves_memory_and_is_read_through(store, monkeypatch):
    monkeypatch.setattr(live_changes, "VALUES_CACHED", 0)
    state = LiveState(KEYRING, store)
    for number in range(3):
        state.apply(as_read(message(number), number, partition=0), lambda change: None)
    drained = MailboxClaim(to="bo", request_id="drain", limit=2).record(door="http", principal="bo")
    state.apply(as_read(drained, 3, partition=0), lambda change: None)
    assert [row.key for row in state.live(MessageRow.VIEW)] == ["default/bo/m2"]
    written(state, store)
    assert not state._recent._values and not state._flushing and not any(state._unflushed.rows.values())
    found = state.find(MessageRow.VIEW, "default/bo/m0")
    assert found is not None and found[1].status == "claimed" and found[0] == 3
    body = state.find(MessageBodyRow.VIEW, "default/bo/m0")
    assert body is not None and body[1].body == "text 0"
    again = state.apply(as_read(message(0), 4, partition=0), lambda change: None)
    assert again is not None and again.verdict == "duplicate", "the id is read through, too"


@pytest.mark.requirement("ST-35")
def test_the_memory_of_a_record_that_changes_many_rows_is_counted_by_the_rows(store):
    state = LiveState(KEYRING, store)
    for number in range(300):
        state.apply(as_read(message(number), number, partition=0), lambda change: None)
    written(state, store)
    assert state.waiting() == (0, 0)
    cleared = MailboxClearing(to="bo", request_id="clear").record(door="http", principal="operator")
    state.apply(as_read(cleared, 300, partition=0), lambda change: None)
    records, size = state.waiting()
    assert (records, size >= 300 * OVERHEAD_BYTES) == (1, True)


@pytest.mark.requirement("ST-31")
def test_a_stopped_participant_and_its_keys_leave_memory(store, monkeypatch):
    monkeypatch.setattr(live_changes, "VALUES_CACHED", 0)
    state, by = LiveState(KEYRING, store), {"door": "http", "principal": "operator"}
    key = public_key()
    joined = AgentJoined(agent_name="mara", request_id="j", public_key=key, task="count", capabilities=["c"])
    state.apply(as_read(joined.record(**by), 0, partition=0), lambda change: None)
    assert [row.key for row in state.live(ParticipantRow.VIEW)] == ["mara"]
    stopped = AgentStopped(agent_name="mara", request_id="s")
    state.apply(as_read(stopped.record(**by), 1, partition=0), lambda change: None)
    written(state, store)
    assert state.live(ParticipantRow.VIEW) == state.live(AgentKeyRow.VIEW) == []
    found = state.find(AgentKeyRow.VIEW, f"mara/{key_id_of(key)}")
    assert found is not None and found[1].status == "removed"
    assert [row.agent_name for row in state.newest_ended(ParticipantRow.VIEW, STOPPED, WHOLE)] == ["mara"]


def test_a_row_that_changed_since_it_was_read_is_not_cached_in_its_old_form(store):
    state = LiveState(KEYRING, store)
    state.apply(as_read(message(0), 0, partition=0), lambda change: None)
    written(state, store)
    assert state.find(JobRow.VIEW, "none") is None
    key = "default/bo/m0"
    drained = MailboxClaim(to="bo", request_id="drain", limit=1).record(door="http", principal="bo")
    state.apply(as_read(drained, 1, partition=0), lambda change: None)
    taken, place = state.take()
    assert state.find(MessageRow.VIEW, key)[1].status == "claimed", "between the take and the write"
    store.advance(state.place, place, taken.entry_changes(), taken.row_changes())
    state.flushed(taken, place)
    assert state.find(MessageRow.VIEW, key)[1].status == "claimed"


@pytest.mark.requirement("ST-30")
@pytest.mark.parametrize("seed", range(5))
def test_the_keys_of_a_stream_are_those_of_the_store_with_all_changes(store: GatewayStore, seed: int) -> None:
    state, draw, wanted = LiveState(KEYRING, store), random.Random(seed), set[str]()
    keys, taken = [f"{prefix}/{number:03d}" for prefix in "lmn" for number in range(60)], None
    for _ in range(400):
        changed = draw.sample(keys, 5)
        writes = {key: draw.choice([b"value", None]) for key in changed}
        state._unflushed.write(STREAM, writes)
        wanted = (wanted - writes.keys()) | {key for key, value in writes.items() if value is not None}
        after, most = draw.choice(["", "m/010", "m/0300"]), draw.choice([1, 3, 32, 1000])
        found = [key for key in sorted(wanted) if key.startswith("m/") and key > after]
        assert state.entry_keys(STREAM, "m/", after, most) == found[:most]
        if draw.random() < 0.1:
            if taken is not None:
                store.advance(state.place, taken[1], taken[0].entry_changes(), ())
                state.flushed(*taken)
            taken = None if taken is not None else state.take()
