"""Derived records of a message that says that its sender's task is completed (HH-07), without Kafka."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.fold.view_rows import Row
from schemas.streams.fold import settle
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_READ
from schemas.streams.mailboxes.message import Message, MessageRow
from schemas.streams.task.task_registry import (
    TaskCancellation,
    TaskRow,
    TaskStart,
    result_text,
    result_value,
)
from schemas.wire.record import OutgoingRecord, Record
from tests.connectors.hub.reactor.followed import follows
from tests.schemas.job_records import KEYRING, said
from tests.schemas.stream_records import GOOD, as_read, good_record
from trunkline_agent.wire.ids import parse_stream_key

pytestmark = pytest.mark.requirement("HH-07")

DONE = "task.completed"
_TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
_NUMBER = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBER | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=10,
)


class Folded:
    """A log in memory, folded as it grows: the rows that the reactor asks for."""

    def __init__(self) -> None:
        self._entries: dict[str, Entries] = {}
        self._rows: dict[tuple[str, str], Row] = {}
        self._offset = 0

    def add(self, made: OutgoingRecord) -> tuple[Settled, Record]:
        """Settle a record that a door has made."""
        self._offset += 1
        record = as_read(made, self._offset)
        settled = settle(record, self._entries.setdefault(made.stream, Entries()), KEYRING, Entries())
        for change in settled.changes:
            if change.row is not None:
                self._rows[change.view, change.key] = change.row
        return settled, record

    def get(self, row_type: type[Any], key: str) -> Any:
        """Return a row, as `LiveView.get`."""
        return self._rows.get((row_type.VIEW, key))

    def follow(self, record: Record) -> list[OutgoingRecord]:
        """Return the records that follow from `record` now, without readings."""
        return [made for made in follows(record, self.get) if made.type != MESSAGE_READ]

    def readings(self, record: Record) -> list[OutgoingRecord]:
        """The hub's readings that follow."""
        return [made for made in follows(record, self.get) if made.type == MESSAGE_READ]

    def task(self, task_id: str) -> TaskRow:
        """The row of a task."""
        row = self.get(TaskRow, task_id)
        assert isinstance(row, TaskRow)
        return row


def posting(payload: Any, message_id: str = "m1", **changed: Any) -> OutgoingRecord:
    """The record of a message from the agent `echo` with the token of the task `t1`."""
    fields = {"from": "echo", "from_verified": True, "from_task": "t1", "to": "hub", "kind": "event"}
    body = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    message = Message.model_validate({"message_id": message_id, **fields, "body": body, **changed})
    return message.record(door="http", principal=str(changed.get("from", "echo")))


def done(**more: Any) -> dict[str, Any]:
    """The payload of a message that says so."""
    return {"event": DONE, **more}


def started(task_id: str = "t1", sha256: str = "ab" * 32) -> OutgoingRecord:
    """The record that starts a task."""
    body = TaskStart(
        task_id=task_id,
        request_id=task_id,
        description="count the stars",
        agent_name="echo",
        capabilities=["answer"],
        token_sha256=sha256,
        expiry_ms=1000,
    )
    return body.record(door="http", principal="operator")


def followed(log: Folded, made: OutgoingRecord) -> list[OutgoingRecord]:
    """Return the records that follow from a record that is accepted."""
    settled, record = log.add(made)
    assert said(settled) == ("accepted", None)
    return log.follow(record)


def only(found: list[OutgoingRecord]) -> OutgoingRecord:
    """The one record that follows."""
    (record,) = found
    return record


def test_a_message_that_says_so_completes_the_task_of_its_sender_with_its_result():
    log = Folded()
    log.add(started())
    record = only(followed(log, posting(done(result="7 stars"))))
    assert (record.stream, record.type) == ("task/t1", DONE)
    assert (record.door, record.principal) == ("reactor", "reactor")
    assert said(log.add(record)[0]) == ("accepted", None)
    row = log.task("t1")
    assert (row.status, row.result, row.ended_by) == ("completed", "7 stars", record.ce_id)


@pytest.mark.requirement("HH-06")
def test_the_hub_reads_what_is_sent_to_it_and_nobody_elses():
    log = Folded()
    for payload in (done(), {"text": "hello"}, "null"):
        message_id = f"m{len(str(payload))}"
        posted, record = log.add(posting(payload, message_id))
        assert said(posted) == ("accepted", None)
        reading = only(log.readings(record))
        assert (reading.stream, reading.door) == ("mailbox/default/hub", "reactor")
        assert only(log.readings(record)).ce_id == reading.ce_id
        assert said(log.add(reading)[0]) == ("accepted", None)
        row = log.get(MessageRow, f"default/hub/{message_id}")
        assert isinstance(row, MessageRow) and row.status == "read"
        # Once it is read nothing follows any more.
        assert log.readings(record) == []
    for number, other in enumerate(({"to": "bo"}, {"to": "hub", "realm": "elsewhere"})):
        assert log.readings(log.add(posting({}, f"o{number}", **other))[1]) == []


@pytest.mark.parametrize("recipient", ["hub", "bo", "operator", "echo"])
@pytest.mark.parametrize("kind", ["event", "task.completed", "ask"])
def test_it_does_so_whoever_the_message_is_for_and_whatever_its_type(recipient, kind):
    assert only(followed(Folded(), posting(done(), to=recipient, kind=kind))).stream == "task/t1"


def test_derived_again_it_is_the_same_record_and_each_message_has_its_own():
    log = Folded()
    settled, record = log.add(posting(done(result="x")))
    assert settled.verdict == "accepted"
    first, second = log.follow(record), log.follow(record)
    assert first == second and only(first).ce_id
    # The same message again is a duplicate, and what follows from it has the same id.
    again, copy = log.add(posting(done(result="x")))
    assert again.verdict == "duplicate"
    assert [one.ce_id for one in log.follow(copy)] == [only(first).ce_id]
    assert only(followed(log, posting(done(result="x"), "m2"))).ce_id != only(first).ce_id


def test_of_two_messages_the_first_completes_and_neither_changes_a_task_that_has_ended():
    log = Folded()
    log.add(started())
    first = only(followed(log, posting(done(result="first"))))
    second = only(followed(log, posting(done(result="second"), "m2")))
    assert said(log.add(first)[0]) == ("accepted", None)
    assert log.add(first)[0].verdict == "duplicate"
    assert said(log.add(second)[0]) == ("rejected", "after_terminal")
    assert log.task("t1").result == "first"
    log.add(started("t2", "cd" * 32))
    log.add(TaskCancellation(task_id="t2", request_id="q").record(door="http", principal="operator"))
    late = only(followed(log, posting(done(), "m3", from_task="t2")))
    assert said(log.add(late)[0]) == ("rejected", "after_terminal")
    assert log.task("t2").status == "cancelled"


@pytest.mark.parametrize(
    "payload",
    [
        {"event": "task.failed"},
        {"event": "Task.Completed"},
        {"event": [DONE]},
        {"event": {"event": DONE}},
        {"events": DONE},
        {"text": f"event {DONE}"},
        {"inner": {"event": DONE}},
        {DONE: "event"},
        [DONE],
        [{"event": DONE}],
        f'"{DONE}"',
        DONE,
        f'{{"event": "{DONE}"',
        f'{{"event": "{DONE}", "event": "{DONE}"}}',
        "",
        "null",
    ],
)
def test_nothing_follows_from_a_message_that_does_not_say_it_in_its_payloads_event(payload):
    assert followed(Folded(), posting(payload)) == []


@pytest.mark.parametrize("changed", [{"from_task": None}, {"from_verified": False}])
def test_nothing_follows_from_a_message_of_somebody_without_a_tasks_token(changed):
    assert followed(Folded(), posting(done(), **changed)) == []


@pytest.mark.parametrize(
    ("payload", "changed"),
    [
        (done(result="other"), {}),
        (done(result="mine"), {"from_task": "t2"}),
        (done(result="mine"), {"from": "mallory", "from_task": "t3"}),
        (done(result="mine"), {"kind": "other", "from_task": "t2"}),
    ],
)
def test_nothing_follows_from_a_message_that_was_rejected(payload, changed):
    """Another message under an id that is taken, also with the same text: it was refused, so it is nobody's."""
    log = Folded()
    accepted = only(followed(log, posting(done(result="mine"))))
    assert accepted.stream == "task/t1"
    settled, record = log.add(posting(payload, **changed))
    assert said(settled) == ("rejected", "seq_conflict")
    # The derived record may be the one that the first message led to, and no other.
    assert [one for one in log.follow(record) if one.stream != accepted.stream or one != accepted] == []


def test_a_message_that_was_handed_out_meanwhile_completes_all_the_same():
    log = Folded()
    _, record = log.add(posting(done(result="x"), to="bo"))
    claimed, _ = log.add(_claim())
    assert said(claimed) == ("accepted", None)
    assert only(log.follow(record)).stream == "task/t1"


def _claim() -> OutgoingRecord:
    body = {"schema_version": 1, "realm": "default", "to": "bo", "request_id": "q1"}
    value = json.dumps(body, sort_keys=True).encode()
    return OutgoingRecord("mailbox/default/bo", "claim-1", "http", "bo", "message.claimed", value)


@pytest.mark.parametrize(
    ("given_result", "expected"),
    [
        ("7 stars", "7 stars"),
        ("", ""),
        (None, ""),
        (7, "7"),
        ({"b": [1, None], "a": "ü"}, '{"a":"ü","b":[1,null]}'),
        ("bell \u0007 and zero \u0000", "bell \u0007 and zero \u0000"),
    ],
)
def test_the_result_is_text_or_the_json_that_was_given(given_result, expected):
    log = Folded()
    log.add(started())
    record = only(followed(log, posting(done(result=given_result))))
    assert said(log.add(record)[0]) == ("accepted", None)
    assert log.task("t1").result == expected


@pytest.mark.parametrize("unit", ["x", "ü", "\U0001f680", "\u0000"])
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 500_000])
def test_a_long_result_is_cut_to_what_the_task_takes(unit, size):
    log = Folded()
    log.add(started())
    record = only(followed(log, posting(done(result=unit * (size // len(unit.encode()) + 1)))))
    assert said(log.add(record)[0]) == ("accepted", None)
    result = log.task("t1").result
    assert result and set(result) == {unit} and len(result.encode()) <= 65_536


@given(JSON_VALUES, st.booleans())
def test_whatever_json_the_result_is_the_task_is_completed_by_one_record(result, in_a_list):
    log = Folded()
    log.add(started())
    record = only(followed(log, posting(done(result=[result] if in_a_list else result))))
    assert said(log.add(record)[0]) == ("accepted", None)
    assert log.task("t1").status == "completed"


@given(JSON_VALUES)
def test_no_payload_makes_the_reactor_fail_and_none_without_the_event_completes_anything(payload):
    found = followed(Folded(), posting(payload))
    is_done = isinstance(payload, dict) and payload.get("event") == DONE
    assert bool(found) is is_done


@given(st.binary(max_size=80), st.sampled_from(sorted(GOOD)))
def test_no_record_makes_the_reactor_fail(junk, kind):
    log = Folded()
    good = good_record(kind)
    for value in (None, junk, b'{"event":"task.completed"}', f'{{"body":"{DONE}"}}'.encode(), good.value):
        for names in ((), good.header_names):
            values = good.header_values[: len(names)]
            changed = Record("t", 0, 1, 1, good.key, value, names, values)
            assert log.follow(changed) == []
    assert parse_stream_key(good.key) is not None


@pytest.mark.requirement("HB-02")
@given(JSON_VALUES)
@example("42")
@example('"quoted"')
@example(" 1 ")
@example("1e999")
@example({"b": 1, "a": [0.1, None]})
def test_a_result_comes_back_from_its_text_as_it_was(value: Any) -> None:
    text = result_text(value)
    assert result_value(text) == value and type(result_value(text)) is type(value)
    assert text == value or isinstance(json.loads(text), type(value))


def test_a_text_that_is_no_json_is_carried_as_it_is() -> None:
    for text in ("7 stars", "", "{broken", "NaN", "answered 1"):
        assert (result_text(text), result_value(text)) == (text, text)
