"""The states in which the settling job refuses to start. It tells a damaged checkpoint from a lost one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from kafka import TopicPartition
from pyspark.sql import SparkSession

from jobs import settle_events
from jobs.recovery import RecoveryRefused, check_log, check_view_progress, find_start
from jobs.settling.checkpoint_state import CheckpointDamaged, CheckpointFolder, CheckpointGuard
from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import admin_client
from schemas.settings.settings import Settings, StorageSettings
from schemas.tables.ledger import LEDGER
from schemas.tables.ledger_arrow import LEDGER_ARROW
from schemas.tables.view_progress import ViewProgress
from tests.broker_processes import with_kafka
from tests.jobs.conftest import DRAIN_LIMIT_S, ledger_rows
from tests.jobs.topic_load import append_all, event, registration

JOB = "0badcafe"
Damage = Callable[[Path], None]


def write_ledger(settings: Settings, offsets: dict[int, list[int]]) -> None:
    """A ledger that holds these offsets by partition; of the other columns only what must be there."""
    fixed = {"stream_kind": "job", "stream_id": JOB, "logged_at": 0, "verdict": "accepted", "late": False}
    rows = [
        {"topic": settings.kafka.topic, "partition": number, "offset": offset, "fold_version": 2, **fixed}
        for number, found in offsets.items()
        for offset in found
    ]
    write_deltalake(settings.table_path(LEDGER), pa.Table.from_pylist(rows, schema=LEDGER_ARROW), mode="append")


def start_refused(spark: SparkSession, settings: Settings, match: str) -> None:
    """A start without a checkpoint is refused, and nothing was made or changed."""
    before = DeltaTable(settings.table_path(LEDGER)).version()
    with pytest.raises(RecoveryRefused, match=match):
        settle_events.start(spark, settings)
    assert not (Path(settings.checkpoints_root) / "settle_events").exists()
    assert DeltaTable(settings.table_path(LEDGER)).version() == before


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        ({0: [0, 1, 3]}, "gap: 3 of the 4 records up to offset 3 of partition 0"),
        ({0: [0], 1: [1, 2]}, "gap: 2 of the 3 .* of partition 1"),
        ({0: [0, 1, 1, 2]}, "1 records of partition 0 .* twice"),
        ({0: [0, 1, 1, 3]}, "twice"),
        ({0: [*range(40_000), 40_001]}, "gap: 40001 of the 40002"),
    ],
)
def test_a_ledger_with_a_gap_or_a_record_twice_is_refused(
    spark: SparkSession, backbone_settings: Settings, offsets: dict[int, list[int]], match: str
) -> None:
    write_ledger(backbone_settings, offsets)
    start_refused(spark, backbone_settings, match)


def test_a_ledger_of_another_topic_is_refused(spark: SparkSession, backbone_settings: Settings) -> None:
    write_ledger(backbone_settings, {0: [0]})
    start_refused(spark, with_kafka(backbone_settings, topic="other"), "other")


def test_a_log_that_begins_beyond_the_ledger_or_ends_before_it_is_refused(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    kafka = backbone_settings.kafka
    append_all(backbone_settings, [registration(JOB, keyring), *(event(JOB, seq) for seq in range(1, 8))])
    write_ledger(backbone_settings, {number: list(range(50)) for number in range(kafka.partitions)})
    start_refused(spark, backbone_settings, "lost records, or the topic was made anew")
    with admin_client(kafka) as admin:
        wanted = {TopicPartition(kafka.topic, number): -1 for number in range(kafka.partitions)}
        admin.delete_records(wanted)
    with pytest.raises(RecoveryRefused, match="deleted from the log and never settled"):
        check_log(kafka, {})


@pytest.mark.parametrize("seen", [{0: 5, 1: 2}, {0: 5}, {0: 5, 1: 4}, {0: 5, 1: 3, 2: 1}, {}])
def test_views_that_are_not_at_the_ledgers_end_are_refused(seen: dict[int, int]) -> None:
    check_view_progress(ViewProgress({0: 5, 1: 3}, 7), {0: 5, 1: 3, 2: 0})
    with pytest.raises(RecoveryRefused, match="build the views anew"):
        check_view_progress(ViewProgress(seen, 7), {0: 5, 1: 3})


def empty(name: str) -> Damage:
    """Empties all files of one name, as a power cut may."""

    def do(checkpoint: Path) -> None:
        for path in sorted(checkpoint.glob(name)):
            path.write_bytes(b"")

    return do


def remove(name: str) -> Damage:
    """Removes a file or a folder."""

    def do(checkpoint: Path) -> None:
        for path in sorted(checkpoint.glob(name)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return do


DAMAGES: dict[str, Damage] = {
    "no offsets": remove("offsets"),
    "no commits": remove("commits"),
    "no state": remove("state"),
    "the last offsets gone": remove("offsets/1"),
    "the last commits gone": lambda checkpoint: remove("commits/*")(checkpoint),
    "empty offsets": empty("offsets/*"),
    "empty commits": empty("commits/*"),
    "empty metadata": empty("metadata"),
    "something foreign": lambda checkpoint: (checkpoint / "letters.txt").touch(),
}


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_left_and_a_deleted_one_heals(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    settings = backbone_settings
    checkpoint, good = Path(settings.checkpoints_root) / "settle_events", tmp_path / "good"
    append_all(settings, [registration(JOB, keyring)])
    for seq in (1, 2):
        append_all(settings, [event(JOB, seq, "started" if seq == 1 else "progress")])
        query = settle_events.start(spark, settings, available_now=True)
        assert query.awaitTermination(DRAIN_LIMIT_S)
    shutil.copytree(checkpoint, good)
    rows = ledger_rows(settings)

    def put_back() -> None:
        shutil.rmtree(checkpoint)
        shutil.copytree(good, checkpoint)

    for name, damage in DAMAGES.items():
        put_back()
        damage(checkpoint)
        with pytest.raises(CheckpointDamaged) as caught:
            settle_events.start(spark, settings)
        assert str(checkpoint) in str(caught.value), name
        assert "Delete that directory" in str(caught.value), name
        assert checkpoint.exists(), f"{name}: it is the operator's to delete"
    put_back()
    for name in ("offsets", "commits"):
        for batch in (2, 3):
            shutil.copy(checkpoint / name / "1", checkpoint / name / str(batch))
    with pytest.raises(RecoveryRefused, match="finished micro-batch 3, the ledger ends with micro-batch 1\\."):
        settle_events.start(spark, settings)
    put_back()
    (checkpoint / ".metadata.crc").unlink()
    (checkpoint / "metadata").write_text('{"id":"11111111-2222-3333-4444-555555555555"}')
    with pytest.raises(RecoveryRefused, match="of another checkpoint"):
        settle_events.start(spark, settings)
    put_back()
    elsewhere = StorageSettings(tables=str(tmp_path / "no tables"), checkpoints=settings.checkpoints_root)
    with pytest.raises(RecoveryRefused, match="the ledger has no rows"):
        settle_events.start(spark, settings.model_copy(update={"storage": elsewhere}))
    put_back()
    assert find_start(spark, settings, str(checkpoint)) is None
    CheckpointGuard(str(checkpoint))()
    # A query that goes on writing after its checkpoint was deleted leaves this state.
    (checkpoint / "metadata").unlink()
    with pytest.raises(CheckpointDamaged, match="deleted under the running query"):
        CheckpointGuard(str(checkpoint))()
    query = settle_events.start(spark, settings, available_now=True)
    assert query.awaitTermination(DRAIN_LIMIT_S)
    assert ledger_rows(settings) == rows
    assert CheckpointFolder(spark, str(checkpoint)).look().last_batch == 0
