"""The first rule that a record breaks is its reason: each pair of neighbouring rules, broken at once."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.entries import Entries
from schemas.fold import settle
from schemas.record import Record
from schemas.verdicts import REASONS
from tests.schemas.job_records import (
    KEYRING,
    OTHER_SECRET,
    cancellation,
    document_record,
    event,
    make_record,
    registration,
    signed,
    written,
)

CUT = (("ce_bodysize", b"2000000"), ("ce_bodysha256", b"00"))
TOKEN: dict[str, Any] = {"data": {"auth_token": "t"}}


def told(*events: dict[str, Any], registered: bool = True) -> Entries:
    """A job's entries after its registration and `events`, all accepted."""
    entries = Entries()
    records = [document_record(registration(), "job.registered")] if registered else []
    for record in records + [document_record(body) for body in events]:
        assert settle(record, entries, KEYRING).verdict == "accepted"
    return entries


def nothing() -> Entries:
    """No job."""
    return Entries()


def running() -> Entries:
    """A job that has had seqs 1 and 2."""
    return told(signed(1, "started"), signed(2))


def ended() -> Entries:
    """A job whose seq 3 completed it."""
    return told(signed(1, "started"), signed(2), signed(3, "completed"))


def long_job() -> Entries:
    """A job that remembers nothing of seq 2, and has ended."""
    return told(*(signed(seq) for seq in (1, *range(3, 300))), signed(300, "completed"))


# Breaks two rules that stand next to each other -> the reason is the first of them.
PAIRS = [
    ("too_large, malformed: not JSON", nothing, make_record(b"{", more_headers=CUT), "too_large"),
    (
        "malformed: not JSON, no headers",
        nothing,
        Record("t", 0, 0, 0, b"job/ab12cd34", b"{", (), ()),
        "malformed",
    ),
    (
        "malformed: no integer version, schema_version",
        nothing,
        document_record(event(schema_version="2")),
        "malformed",
    ),
    (
        "malformed: other job, schema_version",
        nothing,
        document_record(event(schema_version=2, job_id="0")),
        "malformed",
    ),
    (
        "schema_version, malformed: a field",
        nothing,
        document_record(event(schema_version=2, detail=1)),
        "schema_version",
    ),
    (
        "schema_version, malformed: type",
        nothing,
        document_record(event(schema_version=2), "job.painted"),
        "schema_version",
    ),
    ("malformed: a field, unknown_stream", nothing, document_record(event(seq=0)), "malformed"),
    ("malformed: type, unknown_stream", nothing, document_record(event(), "job.painted"), "malformed"),
    ("unknown_stream, bad_signature", nothing, document_record(event()), "unknown_stream"),
    ("bad_signature, secret_in_event", running, document_record(event(3, **TOKEN)), "bad_signature"),
    ("secret_in_event, seq_conflict", running, document_record(signed(2, **TOKEN)), "secret_in_event"),
    ("secret_in_event, too_late", long_job, document_record(signed(2, **TOKEN)), "secret_in_event"),
    ("secret_in_event, after_terminal", ended, document_record(signed(4, **TOKEN)), "secret_in_event"),
    ("duplicate, after_terminal", ended, document_record(signed(2)), None),
    ("duplicate of the end, after_terminal", ended, document_record(signed(3, "completed")), None),
    ("seq_conflict, after_terminal", ended, document_record(signed(2, detail="other")), "seq_conflict"),
    ("seq_conflict, illegal_transition", running, document_record(signed(2, "started")), "seq_conflict"),
    ("too_late, after_terminal", long_job, document_record(signed(2)), "too_late"),
    ("after_terminal, illegal_transition", ended, document_record(signed(9, "started")), "after_terminal"),
    ("illegal_transition alone", running, document_record(signed(9, "started")), "illegal_transition"),
    ("bad_signature, duplicate", running, document_record(signed(2, secret=OTHER_SECRET)), "bad_signature"),
    ("bad_signature, after_terminal", ended, document_record(event(9)), "bad_signature"),
    (
        "registered: malformed, seq_conflict",
        running,
        document_record(registration(more=1), "job.registered"),
        "malformed",
    ),
    (
        "registered: duplicate, after_terminal",
        ended,
        document_record(registration(), "job.registered"),
        None,
    ),
    (
        "registered: seq_conflict, after_terminal",
        ended,
        document_record(registration(description="x"), "job.registered"),
        "seq_conflict",
    ),
    ("cancelled: unknown_stream", nothing, document_record(cancellation(), "job.cancelled"), "unknown_stream"),
    ("cancelled: after_terminal", ended, document_record(cancellation(), "job.cancelled"), "after_terminal"),
    (
        "other kind of stream: malformed first",
        nothing,
        make_record(b"{", "task.created", key=b"task/t1"),
        "malformed",
    ),
    (
        "other kind of stream: schema_version first",
        nothing,
        make_record(b'{"schema_version":2}', "task.created", key=b"task/t1"),
        "schema_version",
    ),
    (
        "other kind of stream: then unknown_stream",
        nothing,
        make_record(b'{"schema_version":1}', "task.created", key=b"task/t1"),
        "unknown_stream",
    ),
    (
        "refused by the door, whatever it is",
        nothing,
        make_record(written(signed()), key=b"refused/mqtt"),
        "malformed",
    ),
    (
        "refused by the door and too large",
        nothing,
        make_record(b"x", key=b"refused/mqtt", more_headers=CUT),
        "too_large",
    ),
]


@pytest.mark.requirement("JE-06")
@pytest.mark.parametrize(("past", "record", "reason"), [p[1:] for p in PAIRS], ids=[p[0] for p in PAIRS])
def test_the_first_broken_rule_is_the_reason(past: Any, record: Record, reason: str | None) -> None:
    settled = settle(record, past(), KEYRING)
    assert (settled.verdict, settled.reason) == ("duplicate" if reason is None else "rejected", reason)


def test_the_table_names_every_reason_but_the_one_for_our_own_bugs() -> None:
    assert {reason for *_, reason in PAIRS} - {None} == set(REASONS) - {"fold_failed"}


def test_a_first_event_that_is_not_started_is_accepted_and_implies_running() -> None:
    settled = settle(document_record(signed(4)), told(), KEYRING)
    assert (settled.verdict, settled.late, settled.status_after) == ("accepted", False, "running")


@pytest.mark.requirement("JE-08")
def test_a_finished_job_keeps_a_tombstone_without_its_description() -> None:
    long_text = "a description that nobody needs for ever"
    entries = Entries()
    settle(document_record(registration(description=long_text), "job.registered"), entries, KEYRING)
    assert any(long_text.encode() in value for value in entries.stored().values())
    settled = settle(document_record(signed(1, "completed")), entries, KEYRING)
    assert not any(long_text.encode() in value for value in entries.stored().values())
    row = settled.changes[0].row
    assert row is not None
    assert (row.description, row.status) == (long_text, "completed")
    assert settle(document_record(signed(1, "completed")), entries, KEYRING).verdict == "duplicate"
