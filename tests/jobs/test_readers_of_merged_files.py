"""Each place that reads a table with a filter, on tables whose texts are in files of MERGEs of many rows."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from connectors.cli.keys.key_use_reader import ended_keys, signers_still_under
from connectors.doors.dashboard.past_records import records_between, rejected_before
from connectors.doors.file_bridge.records import known_messages
from connectors.hub.live import table_reader
from connectors.hub.live.table_reader import ids_by_door, newest_settled, postings_by_door, refusals_among
from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from jobs.build_views import ViewBuilder
from jobs.maintain_tables import tidy_views
from jobs.refold import check_views
from jobs.views import view_tables
from jobs.views.view_changes import key_columns
from schemas.state_store import gateway_store
from schemas.streams.control.record_macs import mac_key_ended_records, macs_required_records
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES, VIEWS
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_BODIES, MESSAGE_POSTED, MessageRow
from schemas.tables.delta_files import TableRows, dataset_of
from schemas.tables.ledger import LEDGER
from tests.connectors.hub.live.local_stores import loaded_state
from tests.mixed_tables import FIRST_MOMENT_US, MixedTables, message, read
from tests.test_architecture import PACKAGES, nodes_of, python_files
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED

pytestmark = pytest.mark.requirement("DL-40")

READS = {"to_table", "to_batches", "count_rows"}
# Reads by other columns than texts, whose own tests take merged files, too.
BY_NUMBERS = {"PartitionStates._from_tables", "PartitionStates._changes_in", "_entries_of"}
# The reads of the notebooks, which test_files_of_all_writers.py runs.
BY_NUMBERS |= {"Audit.arrow", "ledger_commit"}


def merged_whole(path: str, keys: tuple[str, ...]) -> None:
    """Write all rows of a table anew by one MERGE, with the same cells."""
    table = DeltaTable(path)
    rows = dataset_of(table).to_table()
    same = " AND ".join(f"t.{key} = s.{key}" for key in keys)
    if rows.num_rows:
        table.merge(rows, same, "s", "t").when_matched_update_all().execute()


def text_types(path: str) -> set[str]:
    """The Arrow types of the text columns in the live files of more than one row."""
    paths = [
        unquote(one) for one in pa.table(DeltaTable(path).get_add_actions(flatten=True))["path"].to_pylist()
    ]
    files = [pq.ParquetFile(f"{path}/{one}") for one in paths]
    schemas = [file.schema_arrow for file in files if file.metadata.num_rows > 1]
    return {
        str(field.type) for schema in schemas for field in schema if "string" in str(field.type).split("<")[0]
    }


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> MixedTables:
    """Tables of some hundred records, each written by one MERGE, with ended messages and a key's end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view_tables, "SHELF_ROWS", 40)
        made = MixedTables(tmp_path_factory.mktemp("merged"))
        count = made.settings.kafka.partitions
        made.settle(*(message(number) for number in range(9)), others=200)
        made.settle(*(read(number) for number in range(5)), others=100)
        made.settle(*macs_required_records(count), *mac_key_ended_records(count, "k0000000a"))
    merged_whole(made.settings.table_path(LEDGER), ("partition", "offset"))
    while made.builder.build():
        pass
    for name in VIEW_TABLES:
        merged_whole(made.settings.table_path(name), key_columns(name))
    for name in (LEDGER, MAILBOX_VIEW, MESSAGE_BODIES, STREAM_ENTRIES):
        assert text_types(made.settings.table_path(name)) == {"string_view"}, name
    return made


def filtered_reads() -> set[str]:
    """The functions of the product that read a table with a filter, as `<module>:<function>`."""
    found = {
        f"{path.as_posix()}:{owner}{function.name}"
        for path in python_files("notebooks", *PACKAGES)
        for owner, function in functions_of(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS
        if any(keyword.arg == "filter" for keyword in node.keywords)
    }
    return {name for name in found if not name.startswith("schemas/tables/delta_files.py")}


def functions_of(path: Path) -> list[tuple[str, ast.FunctionDef]]:
    classes = [node for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    inside = {function: f"{one.name}." for one in classes for function in one.body}
    return [(inside.get(node, ""), node) for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]


class Reads:
    """The functions that have read with a filter."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: set[str] = set()
        for name in READS:
            patch.setattr(TableRows, name, self._noting(getattr(TableRows, name)))

    def _noting(self, read_rows: Callable[..., Any]) -> Callable[..., Any]:
        known = inspect.signature(read_rows)

        def noted(*args: Any, **options: Any) -> Any:
            if known.bind(*args, **options).arguments.get("filter") is not None:
                code = sys._getframe(1).f_code
                path = Path(code.co_filename).relative_to(Path.cwd()).as_posix()
                self.found.add(f"{path}:{code.co_qualname}")
            return read_rows(*args, **options)

        return noted


@pytest.mark.long
def test_each_read_with_a_filter_takes_merged_files_of_many_rows(
    merged: MixedTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, settings, rows = Reads(monkeypatch), merged.settings, merged.rows
    # The look-up of the file bridge for old lines.
    assert known_messages(settings, "default", [f"n-{number}" for number in range(20)]) == {
        ("ann", f"n-{number}") for number in range(9)
    }
    # The look-ups of `keys list` and `keys end`.
    assert ended_keys(settings) == {"k0000000a"}
    monkeypatch.setattr(
        "connectors.cli.keys.key_use_reader._LOOK_BACK", datetime.now(UTC) - datetime(2020, 1, 1, tzinfo=UTC)
    )
    (master,) = {row.mac_key.split(":")[0] for row in rows if row.mac_key and row.verdict == ACCEPTED}
    assert signers_still_under(settings, master, "k0000000b")
    # The start of a gateway with a new store, with few final messages kept.
    monkeypatch.setattr(gateway_store, "FINAL_MESSAGES_KEPT", 2)
    ended = [row for row in merged.view(MAILBOX_VIEW).values() if row["ended_at"]]
    assert len(ended) > 2
    with loaded_state(settings, merged.keyring) as state:
        kept = [row for row in state.rows(MessageRow.VIEW) if row.ended_at]
        assert 0 < len(kept) < len(ended)
        bodies = {row.key for row in state.rows(MESSAGE_BODIES)}
        assert {row.key for row in state.rows(MessageRow.VIEW)} == bodies
        for name in VIEWS:
            if name not in {MAILBOX_VIEW, MESSAGE_BODIES}:
                assert len(list(state.rows(name))) == len(merged.view(name)), name
    # The look-ups of the gateway, the dashboard, the exports and the services in the ledger.
    since = FIRST_MOMENT_US / 1e6
    doors = {row.door for row in rows if row.door}
    for door in doors:
        expected = [row for row in rows if row.door == door]
        assert ids_by_door(settings, door, since) == {row.ce_id for row in expected if row.ce_id}
        some = [row.ce_id for row in expected if row.ce_id][:3]
        assert refusals_among(settings, door, since, some).keys() == set(some)
        assert postings_by_door(settings, door, since) == {
            (f"{row.stream_kind}/{row.stream_id}", row.ce_id) for row in expected if row.type == MESSAGE_POSTED
        }
    assert newest_settled(settings, MESSAGE_POSTED, 5)
    ends = dict(merged.builder.progress.offsets)
    assert len(records_between(settings, {partition: (0, end) for partition, end in ends.items()})) == len(rows)
    assert sum(rejected_before(settings, ends).values()) == sum(row.verdict == REJECTED for row in rows)
    for verdict in (ACCEPTED, REJECTED):
        found = LedgerReader(settings).rows(LedgerFilter(verdict=verdict)).rows.num_rows
        assert found == sum(row.verdict == verdict for row in rows)
    assert table_reader.newest_where(settings, LedgerFilter(verdict=REJECTED), 5)
    # The reads of jobs, by numbers.
    checked = check_views(settings, DeltaTable(settings.table_path(LEDGER)), merged.keyring)
    assert (checked.different, checked.records) == (0, len(rows))
    copy = settings.model_copy(update={"data_dir": tmp_path / "copy"})
    shutil.copytree(settings.data_path, copy.data_path, ignore=shutil.ignore_patterns("views"))
    builder = ViewBuilder(copy)
    for _ in range(2):
        tidy_views(builder, 1)
    expected = {name for name in filtered_reads() if name.split(":")[1] not in BY_NUMBERS}
    assert reads.found >= expected
    assert {name.split(":")[1] for name in filtered_reads()} >= BY_NUMBERS
