"""The hash of a ledger row: written down, read back, and the same in any file that has contained the row."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.tools.audit.ledger_files_reader import LedgerFiles, LedgerPart
from connectors.tools.audit.statistics_check import StatisticsCheck
from jobs.ledger.ledger_table import prepare_ledger
from jobs.maintain_tables import tidy_ledger
from schemas.integrity.ledger_leaves import (
    ENCODINGS,
    NEWEST_ENCODING,
    NO_LEAF,
    encoded_rows,
    leaf_hash,
    ledger_leaves,
)
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.ledger import LEDGER

COLUMNS = ENCODINGS[NEWEST_ENCODING]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOMENTS = st.integers(-(2**52), 2**53).map(lambda us: EPOCH + timedelta(microseconds=us))
OF_TYPE: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.bool_(): st.booleans(),
    pa.timestamp("us", "UTC"): MOMENTS,
    pa.map_(pa.string(), pa.binary()): st.lists(
        st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=3)), max_size=3, unique_by=lambda e: e[0]
    ),
}
ROWS = st.fixed_dictionaries(
    {
        field.name: st.none() | OF_TYPE[field.type] if field.nullable else OF_TYPE[field.type]
        for field in LEDGER_ARROW
    }
)


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, LEDGER_ARROW)


def decoded(data: bytes, columns: tuple[str, ...] = COLUMNS) -> dict[str, Any]:
    """The row that was encoded, by the words of schemas/integrity/ledger_leaves.py alone."""
    width = len(columns)
    there, numbers = data[:width], struct.unpack(f">{width}q", data[width : width * 9])
    at, row = width * 9, {}
    for column, number, is_there in zip(columns, numbers, there, strict=True):
        kind, value = LEDGER_ARROW.field(column).type, None
        if kind in (pa.string(), pa.binary()) or pa.types.is_map(kind):
            found, at = data[at : at + number], at + number
            value = _entries(found) if pa.types.is_map(kind) else found
            value = found.decode() if kind == pa.string() else value
        else:
            value = EPOCH + timedelta(microseconds=number) if pa.types.is_timestamp(kind) else number
        row[column] = value if is_there else None
    assert at == len(data)
    return row


def _entries(data: bytes) -> list[tuple[str, bytes | None]]:
    found: list[tuple[str, bytes | None]] = []
    while data:
        key, value = struct.unpack(">qq", data[:16])
        end = 16 + key + max(value, 0)
        found.append((data[16 : 16 + key].decode(), None if value < 0 else data[16 + key : end]))
        data = data[end:]
    return found


def test_the_newest_encoding_knows_each_column_of_the_ledger() -> None:
    assert list(COLUMNS) == LEDGER_ARROW.names, (
        "a new column needs a new encoding; the old ones stay as they are"
    )


@given(st.lists(ROWS, min_size=1, max_size=4))
@settings(deadline=None, max_examples=200)
def test_what_is_hashed_gives_back_the_row_so_that_no_two_rows_have_one_leaf(
    rows: list[dict[str, Any]],
) -> None:
    batch = batch_of(rows)
    encoded = encoded_rows(batch, COLUMNS).to_pylist()
    assert [decoded(data) for data in encoded] == batch.to_pylist()
    leaves = ledger_leaves(batch, COLUMNS)
    assert leaves == [leaf_hash(data) for data in encoded]
    for at in range(len(rows)):
        assert ledger_leaves(batch.slice(at), COLUMNS) == leaves[at:], "also of a part of a larger batch"


def test_null_and_empty_are_not_the_same_and_nothing_moves_from_one_column_to_the_next() -> None:
    fixed = {"topic": "t", "partition": 0, "offset": 0, "stream_kind": "job", "stream_id": "1", "late": False}
    fixed |= {"logged_at": EPOCH, "verdict": "accepted", "fold_version": 1}
    others: list[dict[str, Any]] = [
        {},
        {"door": ""},
        {"door": "ab"},
        {"door": "a", "principal": "b"},
        {"principal": "ab"},
        {"value": b"ab"},
        {"seq": 0},
        {"seq": 97},
        {"entries": []},
        {"entries": [("a", None)]},
        {"entries": [("a", b"")]},
        {"entries": [("a", b"b")]},
        {"entries": [("ab", b"")]},
        {"sent_at": EPOCH},
    ]
    leaves = ledger_leaves(batch_of([fixed | other for other in others]), COLUMNS)
    assert len(set(leaves)) == len(others)


@given(st.lists(ROWS, min_size=2, max_size=6))
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
def test_leaves_are_the_same_after_a_row_was_stored_and_put_together_with_others(
    tmp_path_factory: Any, rows: list[dict[str, Any]]
) -> None:
    from deltalake import write_deltalake

    made = Settings(data_dir=Path(tmp_path_factory.mktemp("ledger")))
    prepare_ledger(made)
    rows = [row | {"offset": at, "logged_at": EPOCH} for at, row in enumerate(rows)]
    for row in rows:
        write_deltalake(made.table_path(LEDGER), pa.Table.from_batches([batch_of([row])]), mode="append")
    tidy_ledger(made, 0)
    files = LedgerFiles(made)
    (path,), statistics = files.paths, StatisticsCheck(files.said)
    found = {
        offset: leaf
        for group in files.row_groups(path, LedgerPart({}, others=True))
        for batch in statistics.watched(path, group)
        for offset, leaf in zip(batch.column("offset").to_pylist(), ledger_leaves(batch, COLUMNS), strict=True)
    }
    assert [found[at] for at in range(len(rows))] == ledger_leaves(batch_of(rows), COLUMNS)
    assert statistics.findings == [], "what writers say of such rows, and cut, is so"


def test_a_row_of_an_older_encoding_keeps_its_leaf_and_must_have_nothing_in_newer_columns() -> None:
    older = tuple(name for name in COLUMNS if name != "wire")
    row = {"topic": "t", "partition": 0, "offset": 0, "stream_kind": "job", "stream_id": "1", "late": False}
    row |= {"logged_at": EPOCH, "verdict": "accepted", "fold_version": 1}
    batch = batch_of([row, row | {"wire": "{}"}])
    first, second = ledger_leaves(batch, older)
    assert first == leaf_hash(encoded_rows(batch, older)[0].as_py())
    assert second == NO_LEAF
