"""Records, bodies and sealed texts as input: JSON, headers, rows that become records again."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from hypothesis import strategies as st
from pyarrow import table

from connectors.log.ledger_files.ledger_replay import replayable
from schemas.fold.entries import Entries
from schemas.keys.sealing import UnsealError, job_secret_purpose
from schemas.streams.fold import settle
from schemas.tables.ledger import LedgerRow, ledger_row, record_of_row
from schemas.tables.view_progress import PROGRESS_KEY, read_progress
from schemas.wire.record import STANDARD_HEADERS, Record
from tests.fuzz.fuzzing import fuzzed, mutated, mutated_json
from tests.schemas.job_records import (
    JOB_ID,
    KEYRING,
    SECRET,
    START_US,
    TOPIC,
    document_record,
    make_record,
    registration,
    sealed,
    signed,
    written,
)
from tests.schemas.stream_records import GOOD, known_stream
from trunkline_agent.errors import Refused, TrunklineError
from trunkline_agent.wire.ids import parse_stream_key
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode, decode_slowly

EVENT = signed(3, data={"deep": [[{"a": 1.5}]], "text": "gr\u00fc\u00df"})
BODIES = [EVENT, *(body for _, body in GOOD.values())]
HEADERS = st.tuples(st.sampled_from((*STANDARD_HEADERS, "ce_bodysize", "x")), mutated(b"1.0", b"7"))
RECORD_CASES = st.sampled_from(sorted(GOOD)).flatmap(
    lambda name: st.tuples(
        st.just(GOOD[name][0]) | mutated(GOOD[name][0]),
        st.just(written(GOOD[name][1])) | mutated_json(GOOD[name][1]),
        st.just(name) | st.sampled_from(sorted(GOOD)),
        st.just([]) | st.lists(HEADERS, max_size=2),
    )
)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


def _of_64_bits(literal: str) -> int:
    assert -(2**63) <= int(literal) < 2**63
    return int(literal)


TRICKS = (
    b'{"a":1,"a":2}',
    b'{"a":9223372036854775808}',
    b'{"a":[-9223372036854775809,1.5]}',
    b'{"a":1.5,"b":NaN}',
)


@pytest.mark.requirement("CM-02")
@fuzzed(mutated_json(*BODIES) | mutated(*TRICKS), examples=120)
def test_json_is_refused_by_its_rules_or_read_in_one_way_alone(case: bytes) -> str:
    """Both ways of the decoder and the standard library agree, and what was read is written and read again."""
    try:
        found, is_canonical = decode(case)
    except MalformedJsonError as error:
        assert len(str(error)) < 80
        with pytest.raises(MalformedJsonError):
            decode_slowly(case)
        return "refused"
    assert found == decode_slowly(case)
    assert found == json.loads(case, object_pairs_hook=_each_key_once, parse_int=_of_64_bits)
    assert decode(canonical(found))[0] == found
    if is_canonical:
        assert canonical(found) == case
    return "taken"


def _a_job() -> Entries:
    entries = Entries()
    assert (
        settle(document_record(registration(), "job.registered"), entries, KEYRING, Entries()).verdict
        == "accepted"
    )
    return entries


def _record(case: tuple[bytes, bytes, str, list[tuple[str, bytes]]]) -> Record:
    key, value, record_type, headers = case
    made = make_record(value, record_type, key=key)
    values = dict(zip(made.header_names, made.header_values, strict=True)) | dict(headers)
    return Record(TOPIC, 0, 7, START_US, key, value, tuple(values), tuple(values.values()))


@pytest.mark.long
@fuzzed(RECORD_CASES, examples=120)
def test_no_record_fails_the_fold_and_its_row_gives_it_back(case: Any) -> str:
    """Any key, headers, type and body have a verdict and a row, whatever the stream knows already; of the row
    the same record is made.
    """
    record = _record(case)
    settled = settle(record, known_stream(record.key), KEYRING, Entries())
    assert settled.reason != "fold_failed", settled.why
    row = ledger_row(record, settled, KEYRING)
    again = record_of_row(row, KEYRING)
    assert (again.key, again.value) == (record.key, record.value)
    assert ledger_row(again, settle(again, known_stream(again.key), KEYRING, Entries()), KEYRING) == row
    return settled.reason or settled.verdict


@pytest.mark.long
@pytest.mark.requirement("JE-05")
@fuzzed(mutated(written(EVENT)) | mutated_json(EVENT), examples=120)
def test_only_what_was_signed_is_accepted_as_an_event(case: bytes) -> str:
    """Of all mutations of a signed event the fold accepts what says the same, in any notation."""
    settled = settle(make_record(case), _a_job(), KEYRING, Entries())
    if settled.verdict == "accepted":
        assert json.loads(case) == EVENT
    return settled.reason or settled.verdict


TEXTS = (KEYRING.seal(b"what was sealed", "p"), sealed())


@pytest.mark.requirement("CM-05")
@fuzzed(mutated(*(text.encode() for text in TEXTS)), examples=100)
def test_a_sealed_text_opens_to_what_was_sealed_or_not_at_all(case: bytes) -> str:
    """Nothing but UnsealError comes, also under another purpose."""
    text = case.decode("latin-1")
    for purpose, plain in (("p", b"what was sealed"), (job_secret_purpose(JOB_ID), SECRET.encode())):
        try:
            assert KEYRING.open(text, purpose) == plain
        except UnsealError:
            continue
        return "opened"
    return "refused"


def _row(record: Record) -> LedgerRow:
    return ledger_row(record, settle(record, _a_job(), KEYRING, Entries()), KEYRING)


ROW = _row(make_record(None, key=b"x"))
SEALED_ROW = _row(document_record(signed(3, detail="see /etc/passwd")))
ROW_CASES = st.tuples(
    st.sampled_from((ROW, SEALED_ROW)),
    st.sampled_from(("wire", "value_sealed", "stream_id", "stream_kind", "door", "ce_id", "type")),
    mutated_json(json.loads(ROW.wire or "")) | mutated((SEALED_ROW.value_sealed or "").encode(), b"job"),
)


@pytest.mark.long
@fuzzed(ROW_CASES, examples=150)
def test_a_row_that_somebody_wrote_is_a_record_or_an_error_of_its_own(case: Any) -> str:
    """A row of the table may contain anything; a refold reports a bad row and does not crash."""
    row, column, text = case
    row = row._replace(**{column: text.decode("utf-8", "replace")})
    try:
        made = record_of_row(row, KEYRING)
    except (ValueError, UnsealError):
        return "refused"
    assert settle(made, Entries(), KEYRING, Entries()).reason != "fold_failed"
    return "a record"


@fuzzed(ROW_CASES, examples=100)
def test_a_dead_letter_that_somebody_wrote_is_replayed_as_a_record_or_refused(case: Any) -> str:
    """As above, by the command that appends such a record again."""
    row, column, text = case
    changed = {**row._asdict(), column: text.decode("utf-8", "replace"), "verdict": "rejected"}
    try:
        made = replayable({**changed, "value": row.value or b"{}", "logged_at": datetime.now(UTC)}, KEYRING)
    except Refused:
        return "refused"
    assert parse_stream_key(made.key) is not None
    assert made.headers()
    return "a record"


PROGRESS = {"offsets": {"0": 5, "1": 7}, "ledger_version": 3}


@fuzzed(mutated_json(PROGRESS), examples=12)
def test_a_progress_of_the_views_that_nobody_can_read_is_an_error_of_ours(case: bytes) -> str:
    """It stands in a commit of the table, which others may write."""
    properties = CommitProperties(custom_metadata={PROGRESS_KEY: case.decode("utf-8", "replace")})
    with TemporaryDirectory() as folder:
        write_deltalake(folder, table({"a": [1]}), commit_properties=properties)
        try:
            found = read_progress(DeltaTable(folder))
        except TrunklineError:
            return "refused"
    assert all(type(number) is int for pair in found.offsets.items() for number in pair)
    return "read"
