"""The streaming jobs on Spark's standalone cluster, where driver and executors are processes of their own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from connectors.log.kafka_libraries import to_record
from connectors.log.ledger_files.ledger_reader import LedgerReader
from connectors.programs.local_stack.part import Part, PartFailed
from connectors.programs.local_stack.program_plans import streams_plan
from connectors.tools.audit.verification import verify
from jobs.refold import check_views
from jobs.settling.fold_run import settle_run
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE, kafka_password
from schemas.settings.settings import Settings, SparkSettings, ViewSettings
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import read_progress
from schemas.wire.record import Record
from tests.broker_processes import wait_until
from tests.random_log import RandomLog
from tests.raw_records import append_raw, read_to_end
from tests.spark_cluster import SparkCluster

MEMORY = "700m"
SETTLED_WITHIN_S = 90.0
ROUNDS = 10
# A stream's last row in a micro-batch has these columns, so they depend on where micro-batches end.
OF_A_MICRO_BATCH = ("changes", "entries", "accepted_offset")
EVENT_LOG = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}


@pytest.fixture
def cluster(
    backbone_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SparkCluster]:
    """A master with two workers, and a log of what the scheduler of a driver does."""
    monkeypatch.setenv(PASSWORD_VARIABLE, kafka_password(backbone_settings.kafka))
    events = tmp_path / "events"
    events.mkdir()
    more = {**EVENT_LOG, "spark.eventLog.dir": events.as_uri()}
    with SparkCluster(tmp_path / "cluster", MEMORY, more) as started:
        yield started


@pytest.fixture
def streams(
    cluster: SparkCluster, backbone_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Part]]:
    """Starts the part `streams` as the stack does and waits until it is ready; it ends with the test."""
    monkeypatch.setenv("SPARK_CONF_DIR", str(cluster.conf_dir))
    started: list[Part] = []

    def start(**spark: Any) -> Part:
        settings = on_cluster(backbone_settings, cluster, **spark)
        # The test does not measure how fast the driver ends: the machine may be busy.
        part = Part(dataclasses.replace(streams_plan(settings), stop_within_s=100), settings)
        started.append(part)
        try:
            part.start()
        except PartFailed as error:
            logs = "\n".join(cluster.log(f"worker-{number}")[-3000:] for number in (1, 2))
            pytest.fail(f"{error}\n{logs}")
        return part

    yield start
    for part in started:
        part.kill()


def on_cluster(settings: Settings, cluster: SparkCluster, **spark: Any) -> Settings:
    """`settings` with the cluster as Spark's master, and other values of the section `spark`."""
    sections = {
        "spark": SparkSettings(master=cluster.url, driver_memory="700m", executor_memory=MEMORY, **spark),
        "views": ViewSettings(interval_ms=200, maintenance_interval_s=0),
    }
    return settings.model_copy(update=sections)


def batches(settings: Settings, folder: str) -> set[int]:
    """The micro-batches that Spark has begun (`offsets`) or finished (`commits`)."""
    path = settings.state_path / "checkpoint" / folder
    return {int(file.name) for file in path.glob("[0-9]*")} if path.exists() else set()


def begun_and_not_finished(settings: Settings, at_least: int) -> int | None:
    """The micro-batch under way, once it is number `at_least` or a later one."""
    begun = batches(settings, "offsets") - batches(settings, "commits")
    return max(begun) if begun and max(begun) >= at_least else None


def log_of(settings: Settings) -> list[Record]:
    """All records of the topic, by partition and offset."""
    found = map(to_record, read_to_end(settings.kafka))
    return sorted(found, key=lambda record: (record.partition, record.offset))


def views_are_at(settings: Settings, log: list[Record]) -> bool:
    """True if the views have seen all of `log`."""
    if not DeltaTable.is_deltatable(settings.table_path(STREAM_ENTRIES)):
        return False
    offsets = read_progress(DeltaTable(settings.table_path(STREAM_ENTRIES))).offsets
    return all(offsets.get(record.partition, 0) > record.offset for record in log)


def folded_here(log: list[Record], keyring: Keyring) -> pa.Table:
    """The ledger of `log` by the fold alone, in this process."""
    return pa.Table.from_batches([ledger_batch(settle_run(log, lambda _: Entries(), keyring))])


def settling_tasks(folder: Path) -> dict[str, int]:
    """How many tasks have settled records, by executor: those that ended well and have read from Kafka."""
    tasks: dict[str, int] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            # The driver may be writing the last line.
            with suppress(json.JSONDecodeError):
                event = json.loads(line)
                if event["Event"] == "SparkListenerTaskEnd" and event["Task End Reason"]["Reason"] == "Success":
                    executor = event["Task Info"]["Executor ID"]
                    tasks[executor] = tasks.get(executor, 0) + 1
    return tasks


def settled_by(cluster: SparkCluster, number: int, folder: Path) -> int:
    """How many tasks have settled records on the executors that a worker has started."""
    tasks = settling_tasks(folder)
    started = {path.name for path in (cluster.folder / f"worker-{number}").glob("app-*/*")}
    return sum(tasks.get(executor, 0) for executor in started)


def assert_it_is_the_fold_of_the_log(settings: Settings, keyring: Keyring) -> None:
    """Ledger and views are what the pure fold makes of Kafka's records, each of them once."""
    _, rows = LedgerReader(settings).rows()
    ledger = rows.sort_by([("partition", "ascending"), ("offset", "ascending")]).drop_columns(OF_A_MICRO_BATCH)
    folded = folded_here(log_of(settings), keyring).drop_columns(OF_A_MICRO_BATCH)
    assert ledger.num_rows == folded.num_rows, "a record is missing or there twice"
    for name in folded.column_names:
        assert ledger[name].to_pylist() == folded[name].to_pylist(), name
    check = check_views(settings, DeltaTable(settings.table_path(LEDGER)), keyring)
    assert (check.differences, check.records, check.newer) == ([], ledger.num_rows, 0)
    report = verify(settings)
    assert (report.findings, report.rows, report.rows_not_anchored) == ((), ledger.num_rows, 0)


def shown(part: Part, cluster: SparkCluster, events: Path) -> str:
    """Command lines of driver and cluster, and all that they have logged."""
    found = []
    for root in [psutil.Process(part.pid), *cluster.workers.values()]:
        for process in [root, *root.children(recursive=True)]:
            # Some end while we look.
            with suppress(psutil.Error):
                found += process.cmdline()
    logs = [part.log_path, *events.iterdir(), *cluster.folder.glob("*.log"), *cluster.folder.rglob("stderr")]
    return "\n".join([*found, *(path.read_text(errors="replace") for path in logs)])


def append(settings: Settings, log: RandomLog, count: int) -> None:
    """Append records of `log` and wait until the views have seen them."""
    append_raw(settings, log.records(count))
    records = log_of(settings)
    wait_until(lambda: views_are_at(settings, records), SETTLED_WITHIN_S, "all records in the views")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_in_a_micro_batch_loses_and_doubles_nothing(
    cluster: SparkCluster,
    streams: Callable[..., Part],
    backbone_settings: Settings,
    keyring: Keyring,
    tmp_path: Path,
) -> None:
    log = RandomLog(20261123, keyring)
    append_raw(backbone_settings, log.records(1_800))
    part = streams(max_offsets_per_trigger=300)
    under_way = wait_until(
        lambda: begun_and_not_finished(backbone_settings, 2), SETTLED_WITHIN_S, "a micro-batch under way"
    )
    assert cluster.kill_worker(1) >= 2, "the worker, and its executor at least"
    assert under_way not in batches(backbone_settings, "commits"), "it was killed in the middle"
    cluster.start_worker(3)
    events = tmp_path / "events"
    for _ in range(ROUNDS):
        append(backbone_settings, log, 300)
        if settled_by(cluster, 3, events):
            break
    assert part.pid is not None, "the driver went on"
    text = shown(part, cluster, events)
    assert "CoarseGrainedExecutorBackend" in text
    assert cluster.properties["spark.authenticate.secret"] not in text
    part.stop()
    settled = {number: settled_by(cluster, number, events) for number in (1, 2, 3)}
    assert all(settled.values()), f"each has settled, also the one that came later: {settled}"
    assert_it_is_the_fold_of_the_log(backbone_settings, keyring)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_lost_state_is_made_anew_by_executors(
    streams: Callable[..., Part], backbone_settings: Settings, keyring: Keyring
) -> None:
    log = RandomLog(20261124, keyring)
    part = streams()
    append(backbone_settings, log, 1_000)
    part.stop()
    shutil.rmtree(backbone_settings.state_path)
    part = streams()
    append(backbone_settings, log, 500)
    part.stop()
    assert_it_is_the_fold_of_the_log(backbone_settings, keyring)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_who_does_not_have_the_clusters_secret_gets_no_executor(
    cluster: SparkCluster, streams: Callable[..., Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty := tmp_path / "no-conf").mkdir()
    monkeypatch.setenv("SPARK_CONF_DIR", str(empty))
    with pytest.raises(pytest.fail.Exception, match="streams ended with exit code 5 before it was ready"):
        streams()
    state = cluster.state()
    assert state is not None
    assert (state["activeapps"], state["completedapps"]) == ([], [])
    (log,) = tmp_path.rglob("streams.log")
    assert "does SPARK_CONF_DIR hold the cluster's secret?" in log.read_text()
