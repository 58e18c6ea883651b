"""No view shows a secret: the table of patterns, and canaries in every kind of row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold.entries import Entries
from schemas.keys.sealing import value_purpose
from schemas.streams.fold import KINDS, settle
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.wire.record import Record
from tests.schemas.job_records import (
    KEYRING,
    NOTATIONS,
    OTHER_SECRET,
    SECRET,
    document_record,
    event,
    make_record,
    registration,
    signed,
    written,
)
from trunkline_agent.wire.ids import JOB
from trunkline_agent.wire.unsafe_text import _COMPILED, MASK, PATTERNS, mask_opaque, unsafe_pattern

pytestmark = [pytest.mark.requirement("JE-04"), pytest.mark.requirement("CM-05")]

CANARY = "canary8d2f"
UNSAFE_DETAIL = f"password: {CANARY}"
CUT = (("ce_bodysize", b"2000000"), ("ce_bodysha256", b"00"))
UNSAFE = [(row.name, text) for row in PATTERNS for text in row.unsafe]
SAFE = [(row.name, text) for row in PATTERNS for text in row.safe]


@pytest.mark.parametrize(("name", "text"), UNSAFE)
def test_every_example_of_the_table_is_met_by_its_own_row(name: str, text: str) -> None:
    assert unsafe_pattern(text) is not None
    assert _met_by(name, text), f"{text!r} is met by {unsafe_pattern(text)} only"


@pytest.mark.parametrize(("name", "text"), SAFE)
def test_no_counter_example_of_the_table_is_met_by_any_row(name: str, text: str) -> None:
    assert unsafe_pattern(text) is None, name


def _met_by(name: str, text: str) -> bool:
    return any(
        search(text) is not None and any(need in text for need in needs)
        for row, needs, search in _COMPILED
        if row == name
    )


@pytest.mark.parametrize("row", PATTERNS, ids=[row.name for row in PATTERNS])
def test_every_row_has_examples_counter_examples_and_literals_that_spare_the_expression(row: Any) -> None:
    assert row.unsafe
    assert row.safe
    assert all(any(need in text for need in row.needs) for text in row.unsafe)
    assert len({r.name for r in PATTERNS}) == len(PATTERNS)


@given(st.sampled_from([text for _, text in UNSAFE]), st.text(alphabet="ab .,()", max_size=8))
@settings(max_examples=100, deadline=None)
def test_an_unsafe_text_is_found_inside_a_sentence(text: str, around: str) -> None:
    assert unsafe_pattern(f"{around} {text} {around}") is not None


def row_of(record: Record, entries: Entries | None = None) -> LedgerRow:
    """The ledger row of a record of a registered job, with the entries it wrote."""
    if entries is None:
        entries = Entries()
        settle(document_record(registration(), "job.registered"), entries, KEYRING, Entries())
        settle(document_record(signed(2, "progress")), entries, KEYRING, Entries())
        entries.take_writes()
    settled = settle(record, entries, KEYRING, Entries())
    return ledger_row(record, settled, KEYRING, settled.changes, entries.take_writes())


def assert_hidden(row: LedgerRow, record: Record) -> None:
    """The canary is in no field, in no notation, and the bytes as they came lie sealed."""
    shown = repr(row._replace(value_sealed=None)).encode() + (row.value or b"")
    assert CANARY.encode() not in shown.replace(b"\\x00", b"").replace(b"\x00", b"")
    assert row.masked is not None
    assert row.value_sealed is not None
    purpose = value_purpose(row.topic, row.partition, row.offset)
    assert KEYRING.open(row.value_sealed, purpose) == record.value


TOKEN = {"auth_token": CANARY}
EVENTS = {
    "accepted, unsafe detail": (signed(3, detail=UNSAFE_DETAIL), "accepted", None),
    "the end, unsafe detail": (signed(3, "completed", detail=UNSAFE_DETAIL), "accepted", None),
    "late, unsafe detail": (signed(1, detail=UNSAFE_DETAIL), "accepted", None),
    "conflict, unsafe detail": (signed(2, detail=UNSAFE_DETAIL), "rejected", "seq_conflict"),
    "forged, unsafe detail": (
        signed(3, secret=OTHER_SECRET, detail=UNSAFE_DETAIL),
        "rejected",
        "bad_signature",
    ),
    "token": (signed(3, data=TOKEN), "rejected", "secret_in_event"),
    "token in an object": (signed(3, data={"auth_token": {"a": [CANARY]}}), "rejected", "secret_in_event"),
    "token, forged": (event(3, data=TOKEN), "rejected", "bad_signature"),
    "token and detail": (signed(3, data=TOKEN, detail=UNSAFE_DETAIL), "rejected", "secret_in_event"),
    "token, settled seq": (signed(2, data=TOKEN), "rejected", "secret_in_event"),
    "token, other version": (event(3, data=TOKEN, schema_version=2), "rejected", "schema_version"),
    "token, no version": (event(3, data=TOKEN, schema_version=None), "rejected", "malformed"),
    "token, other job": (event(3, data=TOKEN, job_id="00000000"), "rejected", "malformed"),
    "token, bad field": (event(0, data=TOKEN), "rejected", "malformed"),
    "detail too long": (event(3, detail=UNSAFE_DETAIL + "x" * 600), "rejected", "malformed"),
    "detail with a newline": (event(3, detail=UNSAFE_DETAIL + "\n"), "rejected", "malformed"),
    "detail that is a list": (event(3, detail=[UNSAFE_DETAIL]), "rejected", "malformed"),
    "detail that is an object": (event(3, detail={"a": UNSAFE_DETAIL}), "rejected", "malformed"),
    "no object": ([{"data": TOKEN}], "rejected", "malformed"),
    "bare text": (UNSAFE_DETAIL, "rejected", "malformed"),
    "far float": (event(3, data={**TOKEN, "f": 1e300}), "rejected", "bad_signature"),
}


@pytest.mark.parametrize("notation", sorted(NOTATIONS))
@pytest.mark.parametrize(("body", "verdict", "reason"), EVENTS.values(), ids=EVENTS)
def test_neither_token_nor_unsafe_detail_is_in_the_row_of_any_verdict(
    body: Any, verdict: str, reason: str | None, notation: str
) -> None:
    if notation == "backwards" and not isinstance(body, dict):
        notation = "spaced"
    record = make_record(written(body, notation), offset=7)
    row = row_of(record)
    assert (row.verdict, row.reason) == (verdict, reason)
    assert_hidden(row, record)


GOOD = written(event(3, data=TOKEN))
OPAQUE = {
    "cut off in the middle": GOOD[:-20],
    "trailing text": GOOD + b"x",
    "a key twice": GOOD[:-1] + b',"data":{}}',
    "invalid UTF-8": GOOD.replace(b"3/10", b"\xff"),
    "the word escaped": GOOD.replace(b"auth_token", b"\\u0061uth_token") + b"x",
    "the word escaped in capitals": GOOD.replace(b"auth_token", b"\\u0061\\u0055TH_token") + b"x",
    "UTF-16": GOOD.decode().encode("utf-16"),
    "UTF-32": GOOD.decode().encode("utf-32"),
    "a path with escaped slashes": b'{"detail":"see ~\\/' + CANARY.encode() + b'"',
    "a password after an escaped tab": b'{"detail":"password\\t: ' + CANARY.encode() + b'"',
    "credentials in a URL with escaped slashes": b'{"detail":"amqp:\\/\\/u:' + CANARY.encode() + b'@h"',
    "a bare path": b"/etc/" + CANARY.encode(),
    "an assignment": b"API_KEY=" + CANARY.encode(),
    "nested too deep": b'{"data":{"auth_token":"' + CANARY.encode() + b'","x":' + b"[" * 70 + b"]" * 70 + b"}}",
}


@pytest.mark.parametrize("value", OPAQUE.values(), ids=OPAQUE)
def test_a_body_that_cannot_be_read_is_shown_whole_or_not_at_all(value: bytes) -> None:
    without_headers = Record("t", 0, 9, 0, b"job/ab12cd34", value, (), ())
    for record in (
        make_record(value),
        make_record(value, more_headers=CUT),
        make_record(value, key=b"refused/mqtt"),
        make_record(value, key=b"no key of ours"),
        without_headers,
    ):
        row = row_of(record)
        assert row.verdict == "rejected"
        assert_hidden(row, record)
        assert row.value == f"{MASK} {len(value)} bytes".encode()


def test_harmless_malformed_bytes_are_shown_as_they_came() -> None:
    for value in (b"{", b"3/10", b"", "é".encode(), b'{"a":NaN}'):
        row = row_of(make_record(value))
        assert (row.value, row.masked, row.value_sealed) == (value, None, None)
    assert mask_opaque(None) == (None, None)


def test_a_planted_bug_does_not_show_what_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: Any) -> None:
        raise RuntimeError(UNSAFE_DETAIL)

    monkeypatch.setitem(KINDS, JOB, KINDS[JOB]._replace(settle=planted))
    for body in (signed(3, detail=UNSAFE_DETAIL), signed(3, data=TOKEN)):
        record = document_record(body)
        row = row_of(record, Entries())
        assert row.reason == "fold_failed"
        assert_hidden(row, record)


def test_a_masked_detail_names_itself_and_leaves_the_rest_readable() -> None:
    row = row_of(document_record(signed(3, detail=UNSAFE_DETAIL, data={"step": 3})))
    assert row.masked == "detail"
    assert row.value is not None
    document = json.loads(row.value)
    assert (document["detail"], document["data"]["step"], document["seq"]) == (MASK, 3, 3)
    assert row.changes is not None
    assert json.loads(row.changes)[0]["row"]["last_detail"] == MASK


def test_both_masks_are_named_in_one_row() -> None:
    row = row_of(document_record(signed(3, data=TOKEN, detail=UNSAFE_DETAIL)))
    assert row.masked == "detail,data.auth_token"


def test_a_signed_end_with_an_unsafe_detail_ends_its_job() -> None:
    row = row_of(document_record(signed(3, "completed", detail="wrote /home/ann/report")))
    assert (row.verdict, row.status_after) == ("accepted", "completed")


def test_a_key_that_nobody_knows_is_not_quoted_in_the_words_of_a_refusal() -> None:
    for body in (
        registration(**{CANARY: 1}),
        registration(broker={CANARY: 1}),
        registration(description=[CANARY]),
    ):
        settled = settle(document_record(body, "job.registered"), Entries(), KEYRING, Entries())
        assert settled.reason == "malformed"
        assert CANARY not in str(settled.why)


@given(st.text(max_size=30), st.sampled_from(("detail", "event", "timestamp", "job_id", "seq", "data")))
@settings(max_examples=80, deadline=None)
def test_no_refusal_quotes_the_field_it_is_about(text: str, field: str) -> None:
    settled = settle(document_record(event(**{field: CANARY + text})), Entries(), KEYRING, Entries())
    assert CANARY not in str(settled.why)
    assert CANARY not in str(settled.sent_at)


def test_the_secret_of_a_job_is_in_no_row() -> None:
    rows = [
        row_of(document_record(registration(), "job.registered"), Entries()),
        row_of(document_record(signed(3))),
    ]
    assert [row.verdict for row in rows] == ["accepted", "accepted"]
    assert SECRET not in repr(rows)
