"""The states in which the settling job refuses to start, because it would lose or repeat records."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from kafka import TopicPartition
from pyspark.sql import SparkSession

from jobs import settle_events
from jobs.settling.log_checks import StartRefused, check_conf, check_log
from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import admin_client
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.ledger import LEDGER
from tests.broker_processes import with_kafka
from tests.jobs.topic_load import append_all, event, registration

JOB = "0badcafe"


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
    """A start is refused, and no row was added."""
    before = DeltaTable(settings.table_path(LEDGER)).to_pyarrow_table().num_rows
    with pytest.raises(StartRefused, match=match):
        settle_events.start(spark, settings)
    assert not settings.state_path.exists()
    assert DeltaTable(settings.table_path(LEDGER)).to_pyarrow_table().num_rows == before


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
    with pytest.raises(StartRefused, match="deleted from the log and never settled"):
        check_log(kafka, {})


@pytest.mark.requirement("ST-03")
def test_a_spark_that_would_run_tasks_twice_is_refused(spark: SparkSession) -> None:
    conf = spark.sparkContext.getConf()
    check_conf(conf)
    for spelling in ("true", "TRUE", " True "):
        with pytest.raises(StartRefused, match="switch it off"):
            check_conf(conf.set("spark.speculation", spelling))


@pytest.mark.requirement("ST-02")
def test_a_checkpoint_that_cannot_be_deleted_is_named(spark: SparkSession, backbone_settings: Settings) -> None:
    checkpoint = backbone_settings.state_path / "checkpoint"
    backbone_settings.state_path.mkdir(parents=True)
    checkpoint.write_text("no folder")
    with pytest.raises(StartRefused, match=f"{checkpoint} of an earlier run cannot be deleted"):
        settle_events.start(spark, backbone_settings)
