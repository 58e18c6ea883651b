"""The settling job after its local state was lost: it goes on from the tables as if nothing had happened."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from connectors.tools.audit.verification import verify
from jobs import build_views, run_streams, settle_events
from jobs.driver.programs import WriterClaim
from jobs.ledger.ledger_table import create_ledger
from jobs.maintain_tables import tidy_ledger
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings, StorageSettings
from schemas.tables.ledger import LEDGER
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until
from tests.jobs.conftest import Rows, ledger_rows, settle_all
from tests.jobs.topic_load import append_all, event, raw_event, registration
from trunkline_agent.errors import Refused

JOBS = [f"{number:08x}" for number in range(12)]
ENDED, OPEN = JOBS[:6], JOBS[6:]
# A stream's last row in a micro-batch has these columns, and a second run may cut its batches elsewhere.
OF_THE_BATCH = {"changes", "entries", "accepted_offset"}


def undisturbed(spark: SparkSession, settings: Settings) -> Rows:
    """The ledger of a run over the same topic that never lost anything."""
    own = StorageSettings(tables=str(settings.data_path / "other"), state=settings.data_path / "other-state")
    return settle_all(spark, settings.model_copy(update={"storage": own}))


def first_part(keyring: Keyring) -> list[OutgoingRecord]:
    """Jobs that run, half of them to their end."""
    records = [registration(job, keyring) for job in JOBS]
    records += [event(job, seq, "started" if seq == 1 else "progress") for job in JOBS for seq in (1, 2, 3, 5)]
    return records + [event(job, 6, "completed") for job in ENDED]


def second_part(keyring: Keyring) -> list[OutgoingRecord]:
    """Return records whose verdicts depend on the state that the first part left."""
    records = [event(job, 2) for job in JOBS]
    records += [event(job, 3, detail="something else") for job in OPEN]
    records += [event(job, 7) for job in JOBS]
    records += [event(job, 4) for job in OPEN]
    records += [
        registration(JOBS[0], keyring),
        registration("00000fff", keyring),
        event("00000fff", 1, "started"),
    ]
    return [*records, event("0badcafe", 1), raw_event(OPEN[0], b"{}")]


def plain(rows: Rows) -> Rows:
    """The rows without what depends on where micro-batches are cut."""
    return [{name: cell for name, cell in row.items() if name not in OF_THE_BATCH} for row in rows]


def each_once(rows: Rows) -> bool:
    """True if every partition's offsets are there, each of them once."""
    offsets: dict[int, list[int]] = {}
    for row in rows:
        offsets.setdefault(row["partition"], []).append(row["offset"])
    return all(found == list(range(len(found))) for found in offsets.values())


@pytest.mark.requirement("ST-02")
def test_what_comes_after_the_local_state_was_lost_is_settled_as_in_an_undisturbed_run(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    append_all(backbone_settings, first_part(keyring))
    before = settle_all(spark, backbone_settings)
    shutil.rmtree(backbone_settings.state_path)
    append_all(backbone_settings, second_part(keyring))
    rows = settle_all(spark, backbone_settings)
    assert each_once(rows)
    later = [r for r in rows if r not in before]
    assert {(r["verdict"], r["reason"]) for r in later if r["stream_id"] in JOBS} == {
        ("accepted", None),
        ("duplicate", None),
        ("rejected", "seq_conflict"),
        ("rejected", "after_terminal"),
        ("rejected", "malformed"),
    }
    assert {r["stream_id"] for r in later if r["late"]} == set(OPEN)
    append_all(backbone_settings, [*first_part(keyring), *(event(job, 8, "completed") for job in OPEN)])
    rows = settle_all(spark, backbone_settings)
    assert each_once(rows)
    assert plain(rows) == plain(undisturbed(spark, backbone_settings))
    # One audit chain over all starts, and the same roots after maintenance has put all files together.
    tidy_ledger(backbone_settings, 0)
    report = verify(backbone_settings, without_anchors=True)
    assert (report.findings, report.rows, report.rows_before_the_chain) == ((), len(rows), 0)
    assert report.entries >= 3


@pytest.mark.requirement("ST-02")
def test_a_start_after_a_failed_run_that_committed_nothing_makes_the_stores_anew(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    stores = backbone_settings.state_path / "settling"
    append_all(backbone_settings, first_part(keyring))
    # Nobody says that these runs have ended well.
    settle_all(spark, backbone_settings)
    settle_all(spark, backbone_settings)
    assert any(stores.iterdir()), "the run before had committed something"
    settle_all(spark, backbone_settings)
    assert not stores.exists()
    append_all(backbone_settings, second_part(keyring))
    rows = settle_all(spark, backbone_settings)
    assert plain(rows) == plain(undisturbed(spark, backbone_settings))


@pytest.mark.requirement("ST-02")
def test_a_start_after_runs_that_were_quiet_and_ended_well_keeps_the_stores(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    append_all(backbone_settings, first_part(keyring))
    settle_all(spark, backbone_settings)
    stores = {one.stat().st_ino for one in (backbone_settings.state_path / "settling").rglob("data.mdb")}
    assert stores
    for number in range(2):
        stopping, ready = threading.Event(), tmp_path / f"ready {number}"
        with WriterClaim(backbone_settings) as claim:
            given = (spark, backbone_settings, stopping, ready, claim)
            running = threading.Thread(target=run_streams.run, args=given)
            running.start()
            try:
                wait_until(ready.exists, 60, "the streams are ready")
            finally:
                stopping.set()
                running.join(60)
    kept = {one.stat().st_ino for one in (backbone_settings.state_path / "settling").rglob("data.mdb")}
    assert stores <= kept


@pytest.mark.requirement("ST-02")
def test_views_are_prepared_before_the_first_task_reads_them(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    for part in (first_part(keyring), second_part(keyring)):
        append_all(backbone_settings, part)
        settle_all(spark, backbone_settings)
    build_views.catch_up(backbone_settings)
    for path in (backbone_settings.state_path, Path(backbone_settings.table_path(LEDGER))):
        shutil.rmtree(path)
    create_ledger(backbone_settings)
    with WriterClaim(backbone_settings) as claim, pytest.raises(Refused, match="views have seen version"):
        run_streams.run(spark, backbone_settings, threading.Event(), None, claim)
    assert not (backbone_settings.state_path / "settling").exists()
    assert not (backbone_settings.state_path / "checkpoint").exists()


@pytest.mark.slow
@pytest.mark.requirement("ST-02")
def test_state_that_is_deleted_under_load_costs_no_record(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    settings, stopping = backbone_settings, threading.Event()
    append_all(settings, [registration(job, keyring) for job in JOBS])
    sent: list[OutgoingRecord] = []

    def feed() -> None:
        seq = 0
        while not stopping.wait(0.02):
            seq += 1
            batch = [event(job, seq, "started" if seq == 1 else "progress") for job in JOBS]
            append_all(settings, batch)
            sent.extend(batch)

    def batches_done() -> int:
        return int((query.lastProgress or {"batchId": 0})["batchId"])

    feeding = threading.Thread(target=feed)
    query = settle_events.start(spark, settings)
    feeding.start()
    try:
        for _ in range(3):
            goal = batches_done() + 3
            wait_until(lambda goal=goal: batches_done() >= goal, 60, "three micro-batches")
            shutil.rmtree(settings.state_path / "settling")
        # The running query may fail without its checkpoint, or make it again.
        checkpoint = settings.state_path / "checkpoint"
        while (checkpoint / "metadata").exists():
            shutil.rmtree(checkpoint, ignore_errors=True)
        goal, deleted_at = batches_done() + 3, len(ledger_rows(settings))
        wait_until(lambda: batches_done() >= goal or not query.isActive, 60, "the query goes on or fails")
        query.stop()
        query = settle_events.start(spark, settings)
        wait_until(lambda: batches_done() >= 2, 60, "the next query goes on")
    finally:
        stopping.set()
        feeding.join(30)
        query.stop()
    rows = settle_all(spark, settings)
    assert each_once(rows)
    # The topic begins with its topology and the MAC rules of each partition.
    assert len(rows) == len(sent) + len(JOBS) + 1 + settings.kafka.partitions > deleted_at
    assert {(row["verdict"], row["late"]) for row in rows} == {("accepted", False)}
