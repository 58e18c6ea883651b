"""The first rule that a record breaks is its reason: each pair of neighbouring rules, broken at once."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.fold.entries import Entries
from schemas.streams.fold import settle
from schemas.wire.record import Record
from tests.schemas.job_records import (
    KEYRING,
    OTHER_SECRET,
    cancellation,
    document_record,
    event,
    make_record,
    pick,
    registration,
    signed,
    written,
)
from tests.schemas.stream_records import (
    PRINCIPAL_KEY,
    REFUSED_KEY,
    SESSION_KEY,
    addition,
    creation,
    known_stream,
    message,
    refusal,
)
from trunkline_agent.wire.verdicts import REASONS

CUT = (("ce_bodysize", b"2000000"), ("ce_bodysha256", b"00"))
TOKEN: dict[str, Any] = {"data": {"auth_token": "t"}}


def told(*events: dict[str, Any], registered: bool = True) -> Entries:
    """A job's entries after its registration and `events`, all accepted."""
    entries = Entries()
    records = [document_record(registration(), "job.registered")] if registered else []
    for record in records + [document_record(body) for body in events]:
        assert settle(record, entries, KEYRING, Entries()).verdict == "accepted"
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


def picked_and_ended() -> Entries:
    """A job that s1 has picked and completed."""
    entries = told()
    assert settle(document_record(pick(), "job.picked"), entries, KEYRING, Entries()).verdict == "accepted"
    assert settle(document_record(signed(1, "completed")), entries, KEYRING, Entries()).verdict == "accepted"
    return entries


def terminated() -> Entries:
    """A session that request q2 terminated."""
    entries = known_stream(SESSION_KEY)
    stop = document_record(creation("q2", mode="hard"), "session.stopped", key=SESSION_KEY, ce_id="q2")
    assert settle(stop, entries, KEYRING, Entries()).verdict == "accepted"
    return entries


def refused(reason: str) -> Record:
    """A refusal of the HTTP door."""
    return document_record(refusal(reason=reason), "request.refused", key=REFUSED_KEY)


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
    ("picked: malformed, unknown_stream", nothing, document_record(pick("a/b"), "job.picked"), "malformed"),
    ("picked: unknown_stream", nothing, document_record(pick(), "job.picked"), "unknown_stream"),
    ("picked: duplicate, after_terminal", picked_and_ended, document_record(pick(), "job.picked"), None),
    (
        "picked: after_terminal, illegal_transition",
        picked_and_ended,
        document_record(pick("s2"), "job.picked"),
        "after_terminal",
    ),
    ("picked: illegal_transition", running, document_record(pick(), "job.picked"), "illegal_transition"),
    (
        "session: schema_version, malformed",
        nothing,
        document_record(creation(schema_version=2, more=1), "session.created", key=SESSION_KEY),
        "schema_version",
    ),
    (
        "session: malformed by its key, schema_version",
        nothing,
        document_record(creation(schema_version=2), "session.created", key=b"session/s2"),
        "malformed",
    ),
    (
        "session: malformed, unknown_stream",
        nothing,
        document_record(creation(mode="kill"), "session.stopped", key=SESSION_KEY),
        "malformed",
    ),
    (
        "session: duplicate, after_terminal",
        terminated,
        document_record(creation("q2", mode="hard"), "session.stopped", key=SESSION_KEY, ce_id="q2"),
        None,
    ),
    (
        "session: seq_conflict, after_terminal",
        terminated,
        document_record(creation("q2", mode="soft"), "session.stopped", key=SESSION_KEY, ce_id="q2"),
        "seq_conflict",
    ),
    (
        "session: after_terminal, illegal_transition",
        terminated,
        document_record(creation("q3"), "session.resumed", key=SESSION_KEY, ce_id="q3"),
        "after_terminal",
    ),
    (
        "mailbox: malformed by its key, schema_version",
        nothing,
        document_record(message(schema_version=2), "message.posted", key=b"mailbox/default/cy"),
        "malformed",
    ),
    (
        "principal: malformed, unknown_stream",
        nothing,
        document_record({**addition(), "more": 1}, "principal.revoked", key=PRINCIPAL_KEY),
        "malformed",
    ),
    (
        "refused: schema_version, then what the door says",
        nothing,
        document_record(refusal(schema_version=2), "request.refused", key=REFUSED_KEY),
        "schema_version",
    ),
    ("refused: unauthorized", nothing, refused("unauthorized"), "unauthorized"),
    ("refused: policy", nothing, refused("policy"), "policy"),
    ("refused: unknown_recipient", nothing, refused("unknown_recipient"), "unknown_recipient"),
    ("refused: mailbox_full", nothing, refused("mailbox_full"), "mailbox_full"),
    ("refused: rate_limited", nothing, refused("rate_limited"), "rate_limited"),
    ("refused: limit_reached", nothing, refused("limit_reached"), "limit_reached"),
    (
        "a record that sets the rules of MACs, without one: unauthenticated_record first",
        nothing,
        make_record(b"{", "control.macs_required", key=b"control/macs-1"),
        "unauthenticated_record",
    ),
    (
        "other kind of stream: malformed first",
        nothing,
        make_record(b"{", "comet.seen", key=b"comet/halley"),
        "malformed",
    ),
    (
        "other kind of stream: schema_version first",
        nothing,
        make_record(b'{"schema_version":2}', "comet.seen", key=b"comet/halley"),
        "schema_version",
    ),
    (
        "other kind of stream: then unknown_stream",
        nothing,
        make_record(b'{"schema_version":1}', "comet.seen", key=b"comet/halley"),
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
    settled = settle(record, past(), KEYRING, Entries())
    assert (settled.verdict, settled.reason) == ("duplicate" if reason is None else "rejected", reason)


def test_the_table_names_every_reason_but_the_one_for_our_own_bugs() -> None:
    assert {reason for *_, reason in PAIRS} - {None} == set(REASONS) - {"fold_failed"}


def test_a_first_event_that_is_not_started_is_accepted_and_implies_running() -> None:
    settled = settle(document_record(signed(4)), told(), KEYRING, Entries())
    assert (settled.verdict, settled.late, settled.status_after) == ("accepted", False, "running")


@pytest.mark.requirement("JE-08")
def test_a_finished_job_keeps_a_tombstone_without_its_description() -> None:
    long_text = "a description that nobody needs for ever"
    entries = Entries()
    settle(document_record(registration(description=long_text), "job.registered"), entries, KEYRING, Entries())
    assert any(long_text.encode() in value for value in entries.stored().values())
    settled = settle(document_record(signed(1, "completed")), entries, KEYRING, Entries())
    assert not any(long_text.encode() in value for value in entries.stored().values())
    row = settled.changes[0].row
    assert row is not None
    assert (row.description, row.status) == (long_text, "completed")
    assert settle(document_record(signed(1, "completed")), entries, KEYRING, Entries()).verdict == "duplicate"
