"""Filters on every text column of every table, in files of each text type that a writer uses."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from schemas.streams.fold import VIEW_TABLES
from schemas.tables.arrow_tables import LEDGER_ARROW, VIEW_ARROW
from schemas.tables.delta_files import TableRows, dataset_of, dataset_of_files, table_storage
from schemas.tables.ledger import LEDGER

pytestmark = pytest.mark.requirement("DL-40")

TABLES = {LEDGER: LEDGER_ARROW} | {name: VIEW_ARROW[name] for name in VIEW_TABLES}
ROWS = 60


def rows_of(schema: pa.Schema) -> pa.Table:
    """Rows whose texts differ from row to row. None is null: Arrow skips nothing by a column with nulls."""
    columns = {field.name: pa.nulls(ROWS, field.type) for field in schema}
    for field in schema:
        if pa.types.is_string(field.type):
            columns[field.name] = pa.array([f"{field.name}-{number:03}" for number in range(ROWS)], field.type)
    return pa.table(columns | {"number": pa.array(range(ROWS), pa.int64())})


def merged(path: Path, rows: pa.Table) -> DeltaTable:
    """A table with a file of a MERGE for the first half of the rows, and one of a WRITE for the others."""
    half = ROWS // 2
    write_deltalake(path, rows.slice(0, half))
    table = DeltaTable(path)
    table.merge(rows.slice(0, half), "t.number = s.number", "s", "t").when_matched_update_all().execute()
    write_deltalake(table, rows.slice(half), mode="append")
    return DeltaTable(path)


def conditions(name: str) -> list[pc.Expression]:
    """Conditions of each form that readers use, on one text column."""
    column, low, high = pc.field(name), f"{name}-011", f"{name}-042"
    return [
        column == low,
        column != low,
        column >= low,
        column < high,
        column.isin(pa.array([low, high])),
        ~column.isin([low, high]),
        ~((column == low) | (column < high)),
        column.is_null(),
        column.is_valid() & (column > high),
        pc.starts_with(column, f"{name}-01"),
        (pc.field("number") > 5) & (column <= high),
    ]


def answers(rows: TableRows, where: pc.Expression) -> tuple[list[Any], list[Any]]:
    """The numbers of the rows that match, by both ways of reading."""
    whole = rows.to_table(columns=["number"], filter=where)
    batches = list(rows.to_batches(columns=["number"], filter=where, batch_size=7))
    in_parts = [number for batch in batches for number in batch.column("number").to_pylist()]
    assert {batch.schema for batch in batches} <= {whole.schema}
    assert rows.count_rows(where) == whole.num_rows
    return sorted(whole.column("number").to_pylist()), sorted(in_parts)


@pytest.mark.long
@pytest.mark.parametrize("name", TABLES)
def test_a_filter_on_each_text_column_of_a_merged_file_gives_the_rows_that_match(
    name: str, tmp_path: Path
) -> None:
    rows = rows_of(TABLES[name])
    table = merged(tmp_path / name, rows)
    texts = [field.name for field in TABLES[name] if pa.types.is_string(field.type)]
    kinds = {
        column: {str(pq.read_schema(tmp_path / name / path).field(column).type) for path in files(table)}
        for column in texts
    }
    assert texts and set(map(frozenset, kinds.values())) == {frozenset({"string", "string_view"})}
    found = dataset_of(table)
    for column in texts:
        low, high = f"{column}-011", f"{column}-042"
        for where in (pc.field(column) >= low, pc.field(column) == high, pc.field(column).isin([low, high])):
            expected = rows.filter(where).column("number").to_pylist()
            assert sorted(found.to_table(["number"], where).column("number").to_pylist()) == expected, where


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_a_filter_on_text_takes_files_of_each_text_type(kind: pa.DataType, tmp_path: Path) -> None:
    declared = pa.schema([("text", pa.string()), ("number", pa.int64()), ("lacking", pa.string())])
    texts = [f"text-{number:03}" for number in range(ROWS)]
    rows = pa.table({"text": [*texts, *texts[:5], None], "number": range(ROWS + 6)})
    as_written = rows.cast(pa.schema([("text", kind), ("number", pa.int64())]))
    pq.write_table(as_written.slice(0, ROWS), tmp_path / "one.parquet", row_group_size=25)
    pq.write_table(as_written.slice(ROWS), tmp_path / "nulls.parquet")
    found = dataset_of_files(table_storage(str(tmp_path)), ["one.parquet", "nulls.parquet"], declared)
    for where in conditions("text"):
        expected = rows.filter(where).column("number").to_pylist()
        assert answers(found, where) == (expected, expected), where
    any_of = functools.reduce(operator.or_, conditions("text")) & pc.field("lacking").is_null()
    assert found.to_table(filter=any_of).schema == declared
    assert found.to_table(filter=pc.field("lacking") == "x").num_rows == 0


def files(table: DeltaTable) -> list[str]:
    return pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
