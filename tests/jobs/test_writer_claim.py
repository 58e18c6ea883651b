"""Two settling jobs for one ledger, as on two machines: the second is refused, or takes over and fences."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError
from pyspark.sql import SparkSession

from connectors.tools.audit.verification import verify
from jobs import build_views, maintain_tables, rebuild_views, settle_events
from jobs.driver.programs import WriterClaim, nobody_else_writes
from jobs.ledger.ledger_table import create_ledger
from jobs.maintain_tables import tidy_ledger
from jobs.refold import check_views
from jobs.settling.ledger_sink import LedgerSink, SecondWriter
from jobs.views.view_tables import open_tables
from schemas.keys.sealing import Keyring, load_keyring
from schemas.settings.settings import PROJECT_ROOT, Settings, SparkSettings, StorageSettings
from schemas.streams.fold import VIEW_TABLES
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import NO_PROGRESS
from tests.broker_processes import ProgramProcess, program_environment, stand_still, wait_until
from tests.jobs.conftest import DRAIN_LIMIT_S, ledger_rows
from tests.jobs.settled_backbone import Backbone
from tests.jobs.test_run_streams import JOB, status_of
from tests.jobs.topic_load import append_all, event, registration
from tests.s3_server import ObjectStore
from trunkline_agent.errors import Refused

SILENT_S = 3.0
BEAT = "_writer.json"
# Claims the ledger, says so, and ends without a word when its input ends.
_HOLDER = """
import os, sys
from jobs.driver.programs import WriterClaim
from schemas.settings.settings import load_settings
with WriterClaim(load_settings()) as claim:
    print("claimed", flush=True)
    sys.stdin.read()
    os._exit(1)
"""


@pytest.fixture(params=["local disk", "object store"])
def one(backbone_settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """The settings of a job on one machine. Its ledger is there."""
    settings = backbone_settings.model_copy(update={"spark": SparkSettings(silent_after_s=SILENT_S)})
    if request.param == "object store":
        s3: ObjectStore = request.getfixturevalue("s3")
        there = StorageSettings(tables=f"s3://{s3.bucket}/tables")
        settings = settings.model_copy(update={"storage": there})
    create_ledger(settings)
    return settings


@pytest.fixture
def other(one: Settings, tmp_path: Path) -> Settings:
    """The settings of a job on another machine, with the same log, keys and tables alone in common."""
    storage = one.storage.model_copy(update={"tables": one.tables_root})
    update = {"data_dir": tmp_path / "other", "storage": storage, "master_key_file": one.key_file}
    return one.model_copy(update=update)


@pytest.fixture
def holder(one: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has claimed the ledger."""
    command = [sys.executable, "-c", _HOLDER]
    environment = program_environment(one) | {"PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"claimed\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.requirement("DP-13")
def test_a_second_job_is_refused_with_the_place_of_the_first_and_begins_at_once_when_that_has_ended(
    one: Settings, other: Settings
) -> None:
    with WriterClaim(one) as claim:
        with (
            pytest.raises(Refused, match=r"process \d+ on .* writing the tables"),
            WriterClaim(other),
        ):
            pass
        claim.check()
        assert claim.lost is None
    began = time.monotonic()
    with WriterClaim(other):
        assert time.monotonic() - began < SILENT_S / 2


@pytest.mark.requirement("DP-13")
@pytest.mark.parametrize("command", [("jobs.rebuild_views",), ("jobs.switch_fold", "--at", "{}")])
def test_no_other_program_writes_the_tables_beside_a_job_of_another_machine(
    one: Settings, other: Settings, command: Sequence[str]
) -> None:
    with WriterClaim(one):
        program = [sys.executable, "-m", *command]
        refused = subprocess.run(
            program, cwd=PROJECT_ROOT, env=program_environment(other), capture_output=True, timeout=60
        )
    assert (refused.returncode, b"writing the tables: stop it" in refused.stderr) == (4, True), refused.stderr


@pytest.mark.requirement("DP-13")
def test_a_job_that_was_killed_on_this_machine_keeps_nobody_waiting(
    other: Settings, holder: subprocess.Popen[bytes]
) -> None:
    holder.kill()
    holder.wait(20)
    began = time.monotonic()
    with WriterClaim(other):
        assert time.monotonic() - began < SILENT_S / 2


def beat_of(settings: Settings) -> dict[str, Any]:
    """The last sign of life."""
    with table_storage(settings.tables_root).open_input_stream(BEAT) as stream:
        return dict(json.loads(stream.read()))


def write_beat(settings: Settings, text: str) -> None:
    """Write a sign of life."""
    with table_storage(settings.tables_root).open_output_stream(BEAT) as stream:
        stream.write(text.encode())


def beat_from_elsewhere(settings: Settings, **more: Any) -> None:
    """Leave the sign of life of a process on another machine."""
    with WriterClaim(settings):
        found = beat_of(settings)
    found["place"] |= {"boot": "another machine's", "host": "far", "pid": 1}
    write_beat(settings, json.dumps(found | more))


@pytest.mark.requirement("DP-13")
def test_a_process_with_the_number_of_one_that_was_killed_keeps_nobody_waiting(
    one: Settings, other: Settings
) -> None:
    with WriterClaim(one):
        found = beat_of(one)
    assert found["place"]["pid"] == os.getpid()
    found["place"]["started"] -= 1
    write_beat(one, json.dumps(found))
    began = time.monotonic()
    with WriterClaim(other):
        assert time.monotonic() - began < SILENT_S / 2


@pytest.mark.requirement("DP-13")
@pytest.mark.parametrize("term_s", [SILENT_S / 2, SILENT_S * 2])
def test_of_a_job_elsewhere_nothing_but_its_silence_is_known_and_the_longer_of_both_terms_counts(
    one: Settings, other: Settings, term_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    beat_from_elsewhere(one, term_s=term_s)
    began = time.monotonic()
    with WriterClaim(other):
        assert time.monotonic() - began >= max(SILENT_S, term_s)
    assert "process 1 on far may be writing the tables; waiting up to" in capsys.readouterr().err


@pytest.mark.requirement("DP-13")
def test_a_job_that_waits_for_signs_of_life_ends_at_once_when_it_is_told_to(
    one: Settings, start_streams: Callable[..., ProgramProcess]
) -> None:
    patient = one.model_copy(update={"spark": SparkSettings(silent_after_s=300)})
    beat_from_elsewhere(patient)
    version = DeltaTable(one.table_path(LEDGER)).version()
    waiting = start_streams(patient)
    wait_until(lambda: "may be writing the tables" in waiting.log(), DRAIN_LIMIT_S, "it says that it waits")
    assert waiting.stop(timeout_s=10) == 0, waiting.log()[-2000:]
    assert DeltaTable(one.table_path(LEDGER)).version() == version


@pytest.mark.requirement("DP-13")
def test_a_sign_of_life_that_cannot_be_read_delays_the_next_job_and_does_not_prevent_it(
    one: Settings, other: Settings
) -> None:
    for damaged in ("", "[1]", "[]", "{}", '{"claim"', '{"claim": "a", "number": 1, "place": {"pid": "x"}}'):
        write_beat(one, damaged)
        began = time.monotonic()
        with WriterClaim(other) as claim:
            assert time.monotonic() - began >= SILENT_S
            claim.check()
            assert beat_of(one)["number"] >= 1
        with pytest.raises(FileNotFoundError):
            beat_of(one)


@pytest.mark.requirement("DP-13")
def test_of_two_jobs_that_claim_at_once_the_first_sees_that_it_has_lost(one: Settings, other: Settings) -> None:
    first, second = WriterClaim(one), WriterClaim(other)
    real = first._beat

    def beat_late() -> None:
        first._beat = real  # type: ignore[method-assign]
        second.__enter__()
        real()

    first._beat = beat_late  # type: ignore[method-assign]
    try:
        with pytest.raises(Refused, match="another process has taken over"):
            first.__enter__()
        second.check()
    finally:
        second.__exit__(None, None, None)


@pytest.fixture
def settled(one: Settings, tmp_path: Path, keyring: Keyring) -> Settings:
    """The same, with three small files of settled records in the ledger and views of them."""
    backbone = Backbone(tmp_path / "made")
    backbone.settings, backbone.keyring = one, keyring
    for seq in range(1, 4):
        backbone.settle(*([registration(JOB, keyring)] if seq == 1 else []), event(JOB, seq, "progress"))
    build_views.catch_up(one)
    return one


def versions(settings: Settings) -> dict[str, int]:
    """The version of each table."""
    names = (LEDGER, *VIEW_TABLES)
    return {name: DeltaTable(settings.table_path(name)).version() for name in names}


def silent(claim: WriterClaim) -> WriterClaim:
    """Let a process give no sign of life any more, as one that stands still."""
    claim._beat = lambda: None  # type: ignore[method-assign]
    return claim


WRITES: dict[str, Callable[[DeltaTable], object]] = {
    "rows": lambda table: table.create_write_transaction(
        [],
        mode="append",
        schema=table.schema(),
        partition_by=table.metadata().partition_columns,
        commit_properties=CommitProperties(max_commit_retries=0),
    ),
    # As maintenance and a switch of the fold commit, with delta-rs's retries.
    "compaction": lambda table: table.optimize.compact(),
    "vacuum": lambda table: table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True),
    "property": lambda table: table.alter.set_table_properties({"a.b": "c"}, raise_if_not_exists=False),
}


@pytest.mark.requirement("DP-14")
@pytest.mark.parametrize("write", WRITES)
def test_a_job_that_stood_still_across_the_take_over_commits_nothing_to_any_table(
    settled: Settings, other: Settings, holder: subprocess.Popen[bytes], write: str
) -> None:
    # As the job that stands still has read them.
    sink = LedgerSink(settled)
    tables = [DeltaTable(settled.table_path(name)) for name in (LEDGER, *VIEW_TABLES)]
    unused = [table_storage(table.table_uri) for table in tables]
    for storage in unused:
        with storage.open_output_stream("unused.parquet") as stream:
            stream.write(b"of no version")
    stand_still(holder)
    with WriterClaim(other):
        before = versions(settled)
        with pytest.raises(SecondWriter, match="another process has taken over"):
            sink.next_plan()
        for table in tables:
            # A view has no files to join here.
            if write != "compaction" or table is tables[0]:
                with pytest.raises(CommitFailedError):
                    WRITES[write](table)
        assert versions(settled) == before
        assert all(storage.get_file_info("unused.parquet").size for storage in unused)


@pytest.mark.requirement("DP-14")
@pytest.mark.parametrize("looks_again", [True, False])
def test_a_rebuild_that_stood_still_across_the_take_over_changes_no_view_and_harms_no_other_rebuild(
    settled: Settings, other: Settings, monkeypatch: pytest.MonkeyPatch, looks_again: bool
) -> None:
    real = rebuild_views.chunks
    taken: list[WriterClaim] = []
    before: dict[str, int] = {}

    def stand_still_at_the_end(ledger: DeltaTable) -> Iterator[pa.Table]:
        yield from real(ledger)
        monkeypatch.setattr(rebuild_views, "chunks", real)
        taken.append(WriterClaim(other).__enter__())
        if looks_again:
            rebuild_views.rebuild(other, taken[0].check)
        before.update(versions(settled))
        yield from real(ledger)

    monkeypatch.setattr(rebuild_views, "chunks", stand_still_at_the_end)
    try:
        with WriterClaim(settled) as claim:
            silent(claim)
            with pytest.raises(Refused if looks_again else CommitFailedError):
                rebuild_views.rebuild(settled, claim.check if looks_again else nobody_else_writes)
    finally:
        taken[0].__exit__(None, None, None)
    assert versions(settled) == before
    assert check_views(settled, DeltaTable(settled.table_path(LEDGER)), load_keyring(settled)).differences == []


@pytest.mark.requirement("DP-14")
def test_a_process_that_opens_the_tables_after_the_take_over_looks_at_its_claim_and_writes_nothing(
    settled: Settings, other: Settings, spark: SparkSession
) -> None:
    with WriterClaim(settled) as claim:
        silent(claim)
        with WriterClaim(other):
            before = versions(settled)
            for late in (
                lambda: tidy_ledger(settled, check=claim.check),
                lambda: rebuild_views.rebuild(settled, claim.check),
                lambda: build_views.catch_up(settled, claim.check),
                lambda: settle_events.start(spark, settled, check=claim.check),
            ):
                with pytest.raises(Refused, match="another process has taken over"):
                    late()
            assert versions(settled) == before and not spark.streams.active


@pytest.mark.requirement("DP-14")
def test_a_process_that_has_read_a_table_again_after_the_claim_commits_nothing_to_it(
    settled: Settings, other: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = table_storage(settled.table_path(LEDGER))
    with ledger.open_output_stream("unused.parquet") as stream:
        stream.write(b"of no version")
    taken: list[WriterClaim] = []

    def stand_still(table: DeltaTable) -> None:
        taken.append(WriterClaim(other).__enter__())
        table.update_incremental()

    monkeypatch.setattr(maintain_tables, "compact_ledger", stand_still)
    try:
        with WriterClaim(settled) as claim:
            tables = open_tables(settled)
            silent(claim)
            with pytest.raises(Refused, match="another process has taken over"):
                tidy_ledger(settled, 0, check=claim.check)
            assert ledger.get_file_info("unused.parquet").size
            before = versions(settled)
            for table in tables.values():
                table.delta.update_incremental()
                with pytest.raises(Refused, match="another process has taken over"):
                    table.tidy(0)
                with pytest.raises(Refused, match="another process has taken over"):
                    table.note(NO_PROGRESS)
            assert versions(settled) == before
    finally:
        taken[0].__exit__(None, None, None)


@pytest.mark.requirement("DP-13")
@pytest.mark.requirement("DP-14")
@pytest.mark.timeout(600)
def test_a_job_that_hangs_is_replaced_and_ends_when_it_wakes_with_each_record_settled_once(
    start_streams: Callable[..., ProgramProcess], one: Settings, other: Settings, keyring: Keyring
) -> None:
    first = start_streams(one)
    first.wait_ready(DRAIN_LIMIT_S)
    refused = start_streams(other)
    wait_until(lambda: refused.process.poll() is not None, DRAIN_LIMIT_S, "the second one is refused")
    assert refused.process.returncode == 4 and "is writing the tables: stop it first" in refused.log()
    append_all(one, [registration(JOB, keyring)])
    wait_until(lambda: status_of(one) == "pending", DRAIN_LIMIT_S, "the first one settles")
    stand_still(first.process)
    second = start_streams(other)
    second.wait_ready(DRAIN_LIMIT_S)
    append_all(one, [event(JOB, 1, "started")])
    wait_until(lambda: status_of(one) == "running", DRAIN_LIMIT_S, "the second one settles")
    first.process.send_signal(signal.SIGCONT)
    append_all(one, [event(JOB, 2, "completed")])
    wait_until(lambda: first.process.poll() is not None, DRAIN_LIMIT_S, "the first one ends")
    assert first.process.returncode == 1 and "another process has taken over" in first.log()
    wait_until(lambda: status_of(one) == "completed", DRAIN_LIMIT_S, "the second one goes on")
    assert second.stop(timeout_s=60) == 0, second.log()[-3000:]
    assert set(Counter((row["partition"], row["offset"]) for row in ledger_rows(one)).values()) == {1}
    assert verify(one).findings == ()
    command = [sys.executable, "-m", "jobs.rebuild_views", "--check"]
    assert subprocess.run(command, cwd=PROJECT_ROOT, env=program_environment(other), timeout=60).returncode == 0
