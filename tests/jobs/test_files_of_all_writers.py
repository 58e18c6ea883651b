"""Each reader of the tables, on tables whose files were written by every writer there is."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from connectors.doors.dashboard.past_records import records_between, rejected_before
from connectors.doors.file_bridge.records import known_messages
from connectors.hub.live.table_reader import newest_settled, verdict_in_ledger
from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.log.ledger_files.message_export_reader import export_messages
from connectors.tools.audit.verification import verify
from jobs.build_views import ViewBuilder, read_changes
from jobs.ledger.ledger_chain import BatchPlan, Place
from jobs.maintain_tables import tidy_ledger, tidy_views
from jobs.rebuild_views import rebuild
from jobs.refold import check_views, table_rows
from jobs.settling.partition_task import PartitionStates, StageSettings
from jobs.switch_fold import state_of
from jobs.views.view_changes import ends_of
from schemas.settings.settings import Settings
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES, VIEWS
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_BODIES, MESSAGE_POSTED
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.wire.record import Position
from tests.connectors.hub.live.local_stores import loaded_state
from tests.mixed_tables import JOB, MixedTables, mixed_tables
from tests.notebook_run import run_here
from trunkline_agent.wire.verdicts import REJECTED

pytestmark = pytest.mark.requirement("OP-20")

WRITTEN, MERGED = ("string", False), ("string_view", True)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> MixedTables:
    """Tables with files of all kinds; a test that changes them takes a copy."""
    made = mixed_tables(tmp_path_factory.mktemp("mixed"))
    kinds = {"WRITE": {WRITTEN}, "MERGE": {MERGED}, "OPTIMIZE": {WRITTEN}}
    assert made.writers(LEDGER) == made.writers(MAILBOX_VIEW) == kinds
    assert made.writers(MESSAGE_BODIES) == {"WRITE": {WRITTEN}, "OPTIMIZE": {WRITTEN}}
    assert made.writers(STREAM_ENTRIES) == {"WRITE": {WRITTEN}, "MERGE": {MERGED}}
    return made


def copied(mixed: MixedTables, tmp_path: Path) -> Settings:
    """Settings of a copy of the tables."""
    settings = mixed.settings.model_copy(update={"data_dir": tmp_path / "copy"})
    shutil.copytree(mixed.settings.data_path, settings.data_path)
    return settings


def stored(settings: Settings, view: str) -> dict[str, dict[str, Any]]:
    """The rows of a view table by their key, without their positions; times as microseconds."""
    table = dataset_of(DeltaTable(settings.table_path(view))).to_table()
    found = {}
    columns = {}
    for name in VIEWS[view].__struct_fields__:
        column = table[name]
        columns[name] = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
    for cells in pa.table(columns).to_pylist():
        found["/".join(cells[name] for name in VIEWS[view].KEY)] = cells
    return found


def exported(mixed: MixedTables, tmp_path: Path) -> None:
    """`messages export` and the hourly export."""
    made = export_messages(mixed.settings, tmp_path / "messages.parquet")
    bodies = {key: row["body"] for key, row in mixed.view(MESSAGE_BODIES).items()}
    expected = {
        (row["message_id"], row["recipient"], bodies[key]) for key, row in mixed.view(MAILBOX_VIEW).items()
    }
    rows = pq.read_table(made.file).to_pylist()
    assert {(row["id"], row["to_agent"], row["content"]) for row in rows} == expected
    assert made.messages == len(expected)


def loaded(mixed: MixedTables, tmp_path: Path) -> None:
    """The start of the gateway's live view."""
    with loaded_state(mixed.settings, mixed.keyring) as state:
        assert state.place.offsets.items() >= mixed.builder.progress.offsets.items()
        for view in VIEWS:
            rows = {row.key: msgspec.structs.asdict(row) for row in state.rows(view)}
            assert rows == mixed.view(view), view


def refolded(mixed: MixedTables, tmp_path: Path) -> None:
    """`rebuild_views --check`."""
    found = check_views(mixed.settings, DeltaTable(mixed.settings.table_path(LEDGER)), mixed.keyring)
    assert (found.different, found.differences, found.records) == (0, [], len(mixed.rows))


def rebuilt(mixed: MixedTables, tmp_path: Path) -> None:
    """`rebuild_views`."""
    settings = copied(mixed, tmp_path)
    rebuild(settings)
    for view in VIEWS:
        assert stored(settings, view) == mixed.view(view), view


def tidied(mixed: MixedTables, tmp_path: Path) -> None:
    """Maintenance, over files of a MERGE and of its own earlier rounds, then the refold's check."""
    settings = copied(mixed, tmp_path)
    tidy_views(ViewBuilder(settings), 0)
    tidy_ledger(settings, 0)
    found = check_views(settings, DeltaTable(settings.table_path(LEDGER)), mixed.keyring)
    assert (found.different, found.records) == (0, len(mixed.rows))


def verified(mixed: MixedTables, tmp_path: Path) -> None:
    """`audit verify`."""
    report = verify(mixed.settings)
    assert (report.findings, report.rows) == ((), len(mixed.rows))


def read_whole(mixed: MixedTables, tmp_path: Path) -> None:
    """The ledger's reader: whole, filtered, the newest rows, and commit by commit."""
    reader = LedgerReader(mixed.settings)
    expected = pa.Table.from_batches([ledger_batch(mixed.rows)])
    assert reader.rows().rows.equals(expected)
    rejected = LedgerFilter(verdict=REJECTED)
    assert reader.rows(rejected).rows.equals(expected.filter(pc.field("verdict") == REJECTED))
    assert reader.newest_rows(50).rows.equals(expected.slice(len(expected) - 50))
    table = DeltaTable(reader.path)
    merge = next(commit["version"] for commit in table.history() if commit["operation"] == "MERGE")
    for part in reader.follow(merge - 1, stop=lambda: False):
        assert part.rows.schema.equals(expected.schema)
        if part.version == table.version():
            break


def asked(mixed: MixedTables, tmp_path: Path) -> None:
    """The gateway's and the dashboard's questions to the ledger, and the file bridge's to the mailbox view."""
    newest = mixed.rows[-1]
    found = verdict_in_ledger(mixed.settings, Position(newest.partition, newest.offset))
    assert found is not None and (found.verdict, found.logged_at_us) == (newest.verdict, newest.logged_at)
    posted = [row.ce_id for row in mixed.rows if row.type == MESSAGE_POSTED]
    assert [one.ce_id for one in newest_settled(mixed.settings, MESSAGE_POSTED, 5)] == posted[-5:]
    ends = dict(mixed.builder.progress.offsets)
    ranges = {partition: (0, end) for partition, end in ends.items()}
    assert len(records_between(mixed.settings, ranges)) == len(mixed.rows)
    rejected = [row for row in mixed.rows if row.verdict == REJECTED]
    assert rejected_before(mixed.settings, ends) == Counter(row.reason for row in rejected)
    ids = [f"n-{number}" for number in range(9)]
    assert {name for _, name in known_messages(mixed.settings, "default", ids)} == set(ids[:5])


def built(mixed: MixedTables, tmp_path: Path) -> None:
    """build_views, which follows the ledger's commits, and the fold's switch."""
    ledger = DeltaTable(mixed.settings.table_path(LEDGER))
    rows = read_changes(ledger, 1, ledger.version())
    assert set(zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True)) == {
        (row.partition, row.offset) for row in mixed.rows
    }
    state, ends = state_of(mixed.settings), mixed.builder.progress.offsets
    assert state["ledger"] == state["views"] == {str(partition): end for partition, end in sorted(ends.items())}


READERS = (exported, loaded, refolded, rebuilt, tidied, verified, read_whole, asked, built)


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_reader_takes_files_of_all_writers(
    reader: Callable[[MixedTables, Path], None], mixed: MixedTables, tmp_path: Path
) -> None:
    reader(mixed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("folder", [STREAM_ENTRIES, "no such table"])
def test_a_local_store_is_loaded_from_files_of_all_writers(
    mixed: MixedTables, tmp_path: Path, folder: str
) -> None:
    settings = mixed.settings
    at = StageSettings(
        ledger=settings.table_path(LEDGER),
        stream_entries=settings.table_path(folder),
        stores=tmp_path / "stores",
        epoch=1,
        key_file=settings.key_file,
    )
    ledger, entries = (DeltaTable(settings.table_path(name)) for name in (LEDGER, STREAM_ENTRIES))
    places = {partition: Place(end) for partition, end in ends_of(ledger).items()}
    plan = BatchPlan(str(ledger.metadata().id), ledger.version(), places, {})
    found = 0
    for partition in places:
        with PartitionStates(at).at_end(plan, partition) as snapshot:
            for row in table_rows(entries, STREAM_ENTRIES):
                if row["partition"] == partition:
                    stream = f"{row['stream_kind']}/{row['stream_id']}"
                    assert snapshot.stream(stream).get(row["entry"]) == row["value"]
                    found += 1
    assert found == entries.count() > 0


@pytest.mark.parametrize(
    "name", ["agent_audit", "custody_audit", "job_audit", "message_audit", "refusal_audit"]
)
def test_a_notebook_reads_files_of_all_writers(
    name: str, mixed: MixedTables, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    (started,) = [row.ce_id for row in mixed.rows if row.stream_id == JOB and row.type == JOB_EVENT]
    monkeypatch.setenv("TRUNKLINE_AUDIT_EVENT", str(started))
    run = run_here(name, mixed.settings, monkeypatch)
    assert f"{len(mixed.rows)} records" in run.text


def test_all_rows_of_a_table_have_its_own_schema(mixed: MixedTables) -> None:
    for name in (LEDGER, *VIEW_TABLES):
        dataset = dataset_of(DeltaTable(mixed.settings.table_path(name)))
        assert {batch.schema.to_string() for batch in dataset.to_batches()} <= {dataset.schema.to_string()}, (
            name
        )
