"""The ledger's columns: the same in the row, in Arrow and in Spark, and nothing lost between them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring, UnsealError
from schemas.streams.fold import RECORD_TYPES, settle
from schemas.streams.job.job_registry import JobRow
from schemas.tables.arrow_tables import LEDGER_ARROW, ledger_batch, rows_between
from schemas.tables.ledger import COLUMNS, LedgerRow, ledger_row, record_of_row
from schemas.wire.record import read_envelope
from tests.schemas.job_records import (
    JOB_ID,
    KEYRING,
    START_US,
    document_record,
    make_record,
    registration,
    signed,
)
from tests.schemas.stream_records import good_record


def row_of(timestamp: str, offset: int = 0) -> LedgerRow:
    """The row of an event with this timestamp."""
    record = document_record(signed(1, timestamp=timestamp), offset=offset)
    return ledger_row(record, settle(record, Entries(), KEYRING, Entries()), KEYRING)


def test_row_and_arrow_have_the_same_columns_in_the_same_order() -> None:
    assert tuple(LEDGER_ARROW.names) == COLUMNS == LedgerRow._fields


def test_a_column_may_be_null_exactly_where_its_annotation_says_so() -> None:
    for field in LEDGER_ARROW:
        annotation = str(LedgerRow.__annotations__[field.name])
        assert field.nullable == ("None" in annotation.replace("bytes | None]]", "")), field.name


def test_no_rows_make_an_empty_batch_of_the_same_schema() -> None:
    batch = ledger_batch([])
    assert (batch.num_rows, batch.schema) == (0, LEDGER_ARROW)


def test_a_row_survives_arrow_with_its_entries_and_changes() -> None:
    entries, record = Entries(), document_record(registration(), "job.registered", offset=5)
    settled = settle(record, entries, KEYRING, Entries())
    changes = [AppliedChange(change.view, change.key, 5, change.row) for change in settled.changes]
    row = ledger_row(record, settled, KEYRING, changes, {**entries.take_writes(), "gone": None}, 5)
    found = ledger_batch([row]).to_pylist()[0]
    assert dict(found["entries"]) == {**entries.stored(), "gone": None}
    (change,) = json.loads(found["changes"])
    assert (change["view"], change["key"], change["offset"]) == ("registry_jobs", JOB_ID, 5)
    assert msgspec.convert(change["row"], JobRow) == settled.changes[0].row
    assert found["accepted_offset"] == 5
    assert found["logged_at"] == datetime.fromtimestamp(START_US // 10**6, UTC).replace(microsecond=5000)
    assert (found["verdict"], found["late"], found["offset"], found["wire"]) == ("accepted", False, 5, None)


def test_a_batch_without_writes_has_no_entries() -> None:
    row = row_of("2026-11-21T10:00:00Z")
    assert (row.entries, row.changes, row.accepted_offset) == (None, None, None)


TIMES = (
    "2026-11-21T10:00:00Z",
    "2026-11-21T10:00:00.1Z",
    "2026-11-21T10:00:00.999999Z",
    "2026-11-21T10:00:00.123456789Z",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999Z",
    "2026-W47-6T10:00:00Z",
    "2026-11-21",
    "2026-11-21T10:00:00+05:00",
    "2026-11-21 10:00:00",
    "0000-01-01T00:00:00Z",
    "10:00",
    "tomorrow",
    "",
)


@given(st.lists(st.sampled_from(TIMES), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_what_a_sender_says_of_its_time_does_not_depend_on_its_neighbours(times: list[str]) -> None:
    together = ledger_batch([row_of(text) for text in times]).column("sent_at").to_pylist()
    alone = [ledger_batch([row_of(text)]).column("sent_at").to_pylist()[0] for text in times]
    assert together == alone


@given(st.datetimes(min_value=datetime(1, 1, 1), max_value=datetime(9999, 12, 31)))  # noqa: DTZ001
@settings(max_examples=100, deadline=None)
def test_every_microsecond_of_a_time_is_kept(moment: datetime) -> None:
    found = ledger_batch([row_of(moment.isoformat() + "Z")]).column("sent_at").cast(pa.int64()).to_pylist()
    assert found == [(moment - datetime(1970, 1, 1)) // (datetime.resolution)]  # noqa: DTZ001


def test_what_is_no_time_is_null_and_the_row_is_there() -> None:
    for text in ("tomorrow", "2026-11-21", "2026-11-21T10:00:00+05:00", "0000-01-01T00:00:00Z"):
        assert ledger_batch([row_of(text)]).column("sent_at").to_pylist() == [None]


def test_key_and_headers_lie_in_the_row_only_where_its_columns_do_not_give_them_back() -> None:
    usual = document_record(signed())
    odd = make_record(usual.value, more_headers=[("traceparent", b"00-1"), ("x", None)])
    unkeyed = make_record(usual.value, key=b"no key of ours")
    rows = [ledger_row(r, settle(r, Entries(), KEYRING, Entries()), KEYRING) for r in (usual, odd, unkeyed)]
    assert [row.wire is None for row in rows] == [True, False, False]
    assert record_of_row(rows[1], KEYRING) == odd
    assert record_of_row(rows[2], KEYRING) == unkeyed


@pytest.mark.requirement("ST-07")
def test_a_ledger_of_an_earlier_version_is_read_without_the_columns_that_it_lacks() -> None:
    record = document_record(registration(), "job.registered", offset=5)
    row = ledger_row(record, settle(record, Entries(), KEYRING, Entries()), KEYRING)
    rows = pa.Table.from_batches([ledger_batch([row])]).drop_columns(["mac_key", "mac"])
    (found,) = rows_between(ds.dataset(rows), record.partition, 0, 10, COLUMNS)
    assert found.ce_id == row.ce_id
    assert (found.mac_key, found.mac) == (None, None)


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_the_row_of_any_usual_record_gives_it_back_by_its_columns_alone(record_type: str) -> None:
    record = good_record(record_type, offset=3, sender="http/ann", ce_id="r\u00e9")
    row = ledger_row(record, settle(record, Entries(), KEYRING, Entries()), KEYRING)
    assert row.wire is None
    copy = record_of_row(row, KEYRING)
    assert read_envelope(copy) == read_envelope(record)
    as_it_was = {"header_names": record.header_names, "header_values": record.header_values}
    assert msgspec.structs.replace(copy, **as_it_was) == record
    assert settle(copy, Entries(), KEYRING, Entries()) == settle(record, Entries(), KEYRING, Entries())


@pytest.mark.requirement("CM-05")
def test_a_masked_row_cannot_be_refolded_without_its_key() -> None:
    record = document_record(signed(1, detail="wrote /etc/passwd"))
    row = ledger_row(record, settle(record, Entries(), KEYRING, Entries()), KEYRING)
    with pytest.raises(UnsealError):
        record_of_row(row, Keyring({"k2": bytes(32)}, "k2"))
    with pytest.raises(UnsealError):
        record_of_row(row._replace(offset=row.offset + 1), KEYRING)
