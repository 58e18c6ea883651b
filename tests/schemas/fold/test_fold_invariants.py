"""Invariants for every record: the fold never raises, and only accepted records change anything."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.fold.stream_kind import FoldInput
from schemas.streams.agents.mqtt_agents import AGENT_CONFIRMED
from schemas.streams.control.record_macs import MAC_MODELS
from schemas.streams.fold import KINDS, RECORD_TYPES, settle
from schemas.tables.ledger import ledger_row, record_of_row
from schemas.wire.record import STANDARD_HEADERS, Record
from tests.schemas.job_records import (
    JOB_ID,
    KEYRING,
    START_US,
    TOPIC,
    document_record,
    event,
    make_record,
    registration,
    signed,
)
from tests.schemas.stream_records import GOOD, JOB_KEY, known_stream, with_mac
from trunkline_agent.wire.ids import JOB
from trunkline_agent.wire.verdicts import REASONS

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
FIELDS = st.sampled_from(
    sorted({name for _, body in GOOD.values() for name in body} | {*event(), "auth_token", "sender", "handle"})
)
ALMOST_RIGHT = st.builds(
    lambda base, changed, gone: {k: v for k, v in {**base, **changed}.items() if k not in gone},
    st.sampled_from([body for _, body in GOOD.values()]),
    st.dictionaries(FIELDS, JSON, max_size=3),
    st.sets(FIELDS, max_size=1),
)
KEYS = st.sampled_from(
    (
        None,
        b"",
        b"job/ab12cd34",
        b"job/AB12CD34",
        b"job/",
        b"refused/mqtt",
        b"refused/http",
        b"control/topology",
        b"session/s1",
        b"mailbox/default/bo",
        b"mailbox/None/bo",
        b"mailbox/bo",
        b"principal/ann",
        b"task/t1",
        b"x",
    )
) | st.binary(max_size=300)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from((*STANDARD_HEADERS, "ce_bodysize", "traceparent")) | st.text(max_size=5),
        st.none() | st.binary(max_size=12) | st.sampled_from((b"1.0", b"job.event", b"mqtt/x", b"9" * 20)),
    ),
    max_size=9,
)
ENTRY_KEYS = st.sampled_from(("job", "progress", "declared", "session", "principal", "message/m1"))
TYPES = st.sampled_from((*RECORD_TYPES, "job.painted", ""))


@st.composite
def nearly_right(draw: st.DrawFn) -> Record:
    """A record of any type under its own key; often one field is missing, and others are anything."""
    record_type = draw(st.sampled_from(RECORD_TYPES))
    key, body = GOOD[record_type]
    fields = st.sampled_from((*body, "more", "schema_version"))
    body = body | draw(st.dictionaries(fields, JSON, max_size=2))
    for name in draw(st.sets(fields, max_size=1)):
        body.pop(name, None)
    record = document_record(body, record_type, key=key)
    return with_mac(record) if record_type in MAC_MODELS else record


@st.composite
def any_records(draw: st.DrawFn) -> Record:
    """Records from near right to pure noise."""
    if draw(st.booleans()):
        return draw(nearly_right())
    document = st.builds(lambda d: document_record(d).value, ALMOST_RIGHT | JSON)
    value, key = draw(document | st.none() | st.binary(max_size=60)), draw(KEYS)
    if draw(st.booleans()):
        return make_record(value, draw(TYPES), key=key, more_headers=draw(st.just([]) | HEADERS))
    headers = draw(HEADERS)
    names, values = tuple(name for name, _ in headers), tuple(raw for _, raw in headers)
    return Record(TOPIC, 0, 0, START_US, key, value, names, values)


def a_running_job() -> Entries:
    """The entries of a job that was registered and has had its first event."""
    entries = Entries()
    for record in (document_record(registration(), "job.registered"), document_record(signed(1, "started"))):
        assert settle(record, entries, KEYRING, Entries()).verdict == "accepted"
    return entries


def past_of(record: Record, known: bool) -> Entries:
    """The entries that the record finds: of a running job or another known stream, or none."""
    if not known:
        return Entries()
    entries = a_running_job() if record.key == JOB_KEY else known_stream(record.key)
    entries.take_writes()
    return entries


@given(any_records(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_no_record_makes_the_fold_raise_or_fail_and_only_an_accepted_one_changes_entries(
    record: Record, known: bool
) -> None:
    entries = past_of(record, known)
    before = dict(entries.stored())
    settled = settle(record, entries, KEYRING, Entries())
    assert settled.reason != "fold_failed"
    assert (settled.reason in REASONS) == (settled.verdict == "rejected")
    if settled.verdict != "accepted":
        assert (dict(entries.stored()), entries.take_writes(), settled.changes) == (before, {}, ())


@given(any_records(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_record_that_comes_again_is_a_duplicate_or_refused_for_the_same_reason(
    record: Record, known: bool
) -> None:
    entries = past_of(record, known)
    first, again = settle(record, entries, KEYRING, Entries()), settle(record, entries, KEYRING, Entries())
    if first.verdict == "rejected":
        assert again == first
    else:
        # The fold does not remember confirmations: to confirm a message again has no effect.
        headers = dict(zip(record.header_names, record.header_values, strict=True))
        verdict = "accepted" if headers["ce_type"] == AGENT_CONFIRMED.encode() else "duplicate"
        assert (again.verdict, again.changes) == (verdict, ())


@given(any_records(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_record_made_of_its_ledger_row_settles_to_the_same_row(record: Record, known: bool) -> None:
    entries, refolded = (past_of(record, known) for _ in range(2))
    row = ledger_row(record, settle(record, entries, KEYRING, Entries()), KEYRING)
    copy = record_of_row(row, KEYRING)
    assert (copy.key, copy.value) == (record.key, record.value)
    assert ledger_row(copy, settle(copy, refolded, KEYRING, Entries()), KEYRING) == row
    assert refolded.stored() == entries.stored()


@pytest.mark.long
@given(
    known=st.booleans(),
    key=st.sampled_from([key for key, _ in GOOD.values()]),
    value=st.binary(max_size=40) | st.builds(lambda d: document_record(d).value, ALMOST_RIGHT | JSON),
)
@settings(max_examples=300, deadline=None)
def test_no_body_of_any_type_under_any_kind_of_stream_makes_the_fold_fail(
    known: bool, key: bytes, value: bytes
) -> None:
    """Each body is one of every type, so the examples are drawn once for all types."""
    for record_type in RECORD_TYPES:
        record = make_record(value, record_type, key=key)
        assert settle(record, past_of(record, known), KEYRING, Entries()).reason != "fold_failed", record_type


@given(st.dictionaries(ENTRY_KEYS, st.binary(max_size=40)), any_records())
@settings(max_examples=100, deadline=None)
def test_entries_that_cannot_be_read_are_left_as_they_are(stored: dict[str, bytes], record: Record) -> None:
    entries = Entries(dict(stored))
    settled = settle(record, entries, KEYRING, Entries())
    if settled.verdict != "accepted":
        assert entries.stored() == stored


@pytest.mark.requirement("CM-04")
@given(st.lists(st.integers(1, 12), max_size=20), st.integers(0, 22))
@settings(max_examples=60, deadline=None)
def test_replaying_any_prefix_of_a_job_changes_nothing(seqs: list[int], length: int) -> None:
    records = [document_record(registration(), "job.registered")]
    records += [document_record(signed(seq), offset=n) for n, seq in enumerate(seqs, 1)]
    records.append(document_record(signed(13, "completed"), offset=99))
    entries = Entries()
    for record in records:
        settle(record, entries, KEYRING, Entries())
    entries.take_writes()
    before = dict(entries.stored())
    for record in records[:length]:
        assert settle(record, entries, KEYRING, Entries()).verdict == "duplicate"
    assert (dict(entries.stored()), entries.take_writes()) == (before, {})


def _break_the_fold(patch: pytest.MonkeyPatch) -> None:
    def planted(*_: Any) -> None:
        raise RuntimeError("a planted bug with hunter2 in its message")

    patch.setitem(KINDS, JOB, KINDS[JOB]._replace(settle=planted))


def test_a_bug_in_the_fold_costs_one_record_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = a_running_job()
    before = dict(entries.stored())
    record = document_record(signed(2))
    with monkeypatch.context() as patch:
        _break_the_fold(patch)
        settled = settle(record, entries, KEYRING, Entries())
    assert (settled.verdict, settled.reason, settled.why) == ("rejected", "fold_failed", "RuntimeError")
    assert (settled.stream_kind, settled.stream_id, settled.changes) == ("job", JOB_ID, ())
    assert entries.stored() == before
    assert settle(record, entries, KEYRING, Entries()).verdict == "accepted", "the stream goes on"


def test_what_a_broken_fold_wrote_before_it_failed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes_and_fails(given: FoldInput) -> None:
        given.entries.put("job", b"half")
        given.entries.delete("progress")
        raise KeyError("planted")

    entries = a_running_job()
    before = dict(entries.stored())
    monkeypatch.setitem(KINDS, JOB, KINDS[JOB]._replace(settle=writes_and_fails))
    assert settle(document_record(signed(2)), entries, KEYRING, Entries()).reason == "fold_failed"
    assert (entries.stored(), entries.get("job")) == (before, before["job"])


def test_a_record_that_the_fold_failed_on_can_be_refolded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    entries, record = a_running_job(), document_record(signed(2, detail="wrote /etc/passwd"))
    with monkeypatch.context() as patch:
        _break_the_fold(patch)
        row = ledger_row(record, settle(record, entries, KEYRING, Entries()), KEYRING)
    copy = record_of_row(row, KEYRING)
    assert msgspec.structs.replace(copy, header_values=record.header_values) == record
    settled: Settled = settle(copy, entries, KEYRING, Entries())
    assert settled.verdict == "accepted"
