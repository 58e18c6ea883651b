"""The settling job on a real Kafka: rows, order, repetition, poison."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kafka import KafkaProducer
from kafka.admin import NewPartitions
from pyspark.sql import SparkSession

from jobs import run_streams, settle_events
from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import admin_client, partition_count
from schemas.log_access.kafka_clients import client_options
from schemas.settings.settings import Settings, settings_environment
from tests.broker_processes import wait_until
from tests.jobs.conftest import DRAIN_LIMIT_S, ledger_rows
from tests.jobs.planted_bug import TRIGGER, keyring_with_a_bug
from tests.jobs.topic_load import append_all, append_raw, event, raw_event, registration
from tests.raw_records import begin_transaction

JOB = "0badcafe"


def verdicts(rows: list[dict[str, Any]]) -> Counter[tuple[str, str | None]]:
    """How many rows have which verdict and reason."""
    return Counter((row["verdict"], row["reason"]) for row in rows)


@pytest.mark.requirement("JE-06")
@pytest.mark.requirement("JE-07")
@pytest.mark.requirement("JE-08")
def test_each_record_has_one_row_with_its_verdict_bytes_changes_and_entries(
    drain: Callable[[], list[dict[str, Any]]], backbone_settings: Settings, keyring: Keyring
) -> None:
    done = event(JOB, 3, "completed")
    append_all(
        backbone_settings,
        [
            registration(JOB, keyring),
            event(JOB, 1, "started"),
            event(JOB, 2),
            done,
            done,
            event(JOB, 4),
            event("00000bad", 1),
        ],
    )
    rows = drain()
    job = [row for row in rows if row["stream_id"] == JOB]
    assert [(r["verdict"], r["reason"], r["status_after"]) for r in job] == [
        ("accepted", None, "pending"),
        ("accepted", None, "running"),
        ("accepted", None, "running"),
        ("accepted", None, "completed"),
        ("duplicate", None, "completed"),
        ("rejected", "after_terminal", "completed"),
    ]
    assert job[3]["value"] == done.value
    assert [bool(r["entries"]) for r in job] == [False] * 5 + [True], "entries stand on the last row of a batch"
    assert [bool(r["changes"]) for r in job] == [False] * 5 + [True], "and so do the changed rows"
    (change,) = json.loads(job[5]["changes"])
    assert (change["view"], change["row"]["status"], change["row"]["last_seq"]) == (
        "registry_jobs",
        "completed",
        3,
    )
    assert {name for name, _ in job[5]["entries"]} == {"job", "progress"}
    assert change["offset"] == job[3]["offset"], "of the record that made the row, not of the one it stands on"
    assert [r["accepted_offset"] for r in job] == [None] * 5 + [job[3]["offset"]], "the last that was accepted"
    assert {r["accepted_offset"] for r in rows if r["verdict"] == "rejected" and r not in job} == {None}
    assert verdicts(rows)["rejected", "unknown_stream"] == 1
    assert verdicts(rows)["accepted", None] == 9, "the four of the job and the five first ones"


def test_a_second_start_goes_on_where_the_first_ended_and_knows_its_streams(
    drain: Callable[[], list[dict[str, Any]]], backbone_settings: Settings, keyring: Keyring
) -> None:
    append_all(backbone_settings, [registration(JOB, keyring), event(JOB, 1, "started")])
    drain()
    append_all(backbone_settings, [event(JOB, 1, "started"), event(JOB, 2)])
    rows = drain()
    assert [r["verdict"] for r in rows if r["stream_id"] == JOB] == ["accepted"] * 2 + ["duplicate", "accepted"]
    assert len({(r["partition"], r["offset"]) for r in rows}) == len(rows) == 9


def test_the_fold_sees_a_stream_in_offset_order_whatever_spark_does_to_it(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    count = 10_000
    events = (event(JOB, seq, "started" if seq == 1 else "progress") for seq in range(1, count + 1))
    append_all(backbone_settings, [registration(JOB, keyring)])
    append_all(backbone_settings, events)
    spark_settings = {"max_offsets_per_trigger": 10 * count, "tasks": 16}
    settings = backbone_settings.model_copy(
        update={"spark": backbone_settings.spark.model_copy(update=spark_settings)}
    )
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "140")
    try:
        query = settle_events.start(spark, settings, available_now=True)
        assert query.awaitTermination(DRAIN_LIMIT_S)
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)
    assert [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] == [count + 6]
    rows = [row for row in ledger_rows(settings) if row["type"] == "job.event"]
    assert [row["seq"] for row in rows] == list(range(1, count + 1))
    assert {(row["verdict"], row["late"]) for row in rows} == {("accepted", False)}


@pytest.mark.requirement("CM-02")
def test_poison_has_its_row_and_reason_and_the_stream_goes_on(
    drain: Callable[[], list[dict[str, Any]]], backbone_settings: Settings, keyring: Keyring
) -> None:
    key = f"job/{JOB}".encode()
    good = event(JOB, 1, "started")
    append_all(backbone_settings, [registration(JOB, keyring)])
    for value in (
        b"[" * 5_000 + b"]" * 5_000,
        b"\xff\xfe{}",
        b'{"schema_version":1,"detail":"\\ud800"}',
        b'{"schema_version":1,"seq":' + b"9" * 10_000 + b"}",
        b"",
    ):
        append_all(backbone_settings, [raw_event(JOB, value)])
    append_all(backbone_settings, [raw_event(JOB, b"x" * 10 * 1024 * 1024)])
    append_raw(backbone_settings, key, good.value, [])
    append_raw(backbone_settings, key, good.value, good.headers() + good.headers())
    append_raw(backbone_settings, key, None, good.headers())
    append_raw(backbone_settings, None, good.value, good.headers())
    append_raw(backbone_settings, key, good.value, [*good.headers(), ("ce_id\0", b"another")])
    odd = event(JOB, 2)
    append_raw(backbone_settings, key, odd.value, [(f"{name}\0tail", value) for name, value in odd.headers()])
    append_raw(backbone_settings, b"job/#", good.value, good.headers())
    append_raw(backbone_settings, b"\xff/\x00", None, [("\x00", b"\xff")])
    append_all(backbone_settings, [good])
    rows = drain()
    assert verdicts(rows) == {
        ("accepted", None): 8,
        ("rejected", "malformed"): 12,
        ("rejected", "too_large"): 1,
    }
    assert all(row["why"] for row in rows if row["verdict"] == "rejected")
    large = next(row for row in rows if row["reason"] == "too_large")
    assert len(large["value"]) == 1024
    assert str(10 * 1024 * 1024) in large["why"]


def test_a_bug_in_the_fold_costs_its_record_and_not_the_stream(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    settings = backbone_settings
    append_all(
        settings,
        [
            registration(JOB, keyring),
            event(JOB, 1, "started"),
            event(JOB, 2, detail=TRIGGER),
            event(JOB, 3, "completed"),
        ],
    )
    query = settle_events.start(spark, settings, available_now=True, keyring_source=keyring_with_a_bug)
    assert query.awaitTermination(DRAIN_LIMIT_S)
    job = [row for row in ledger_rows(settings) if row["stream_id"] == JOB]
    assert [(r["verdict"], r["reason"]) for r in job] == [
        ("accepted", None),
        ("accepted", None),
        ("rejected", "fold_failed"),
        ("accepted", None),
    ]
    assert job[2]["why"] == "ZeroDivisionError"
    assert job[3]["status_after"] == "completed"


@pytest.mark.requirement("ST-01")
@pytest.mark.parametrize("ending", ["commit_transaction", "abort_transaction"])
def test_the_end_of_a_transaction_between_micro_batches_holds_up_no_record(
    spark: SparkSession, backbone_settings: Settings, ending: str
) -> None:
    query = settle_events.start(spark, backbone_settings)
    try:
        for number in range(1, 4):
            # The first record of the second one comes after the end of the first one.
            transaction = begin_transaction(backbone_settings.kafka)
            wait_until(
                lambda number=number: not query.isActive or len(of_others(backbone_settings)) == number,
                60,
                "the record is settled",
            )
            getattr(transaction, ending)(20)
        assert query.isActive, query.exception()
    finally:
        query.stop()
    first, second, third = of_others(backbone_settings)
    assert (second, third) == (first + 2, first + 4)


def of_others(settings: Settings) -> list[int]:
    """The offsets of the records that `begin_transaction` appends, as the ledger has them."""
    return [row["offset"] for row in ledger_rows(settings) if row["stream_id"] == "0a1b2c3d"]


def test_an_option_that_splits_a_partition_among_tasks_is_refused(
    spark: SparkSession, backbone_settings: Settings
) -> None:
    with pytest.raises(ValueError, match="minPartitions"):
        settle_events.read_records(spark, backbone_settings, {"minPartitions": "40"})


def test_the_job_refuses_a_topic_that_does_not_fit_its_settings(
    backbone_settings: Settings, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = backbone_settings.model_copy(
        update={"kafka": backbone_settings.kafka.model_copy(update={"partitions": 7})}
    )
    for name, value in settings_environment(other).items():
        monkeypatch.setenv(name, value)
    assert run_streams.main() == 1
    said = capfd.readouterr().err
    assert "7" in said
    assert str(backbone_settings.kafka.partitions) in said


@pytest.mark.requirement("OP-55")
def test_records_in_partitions_that_were_added_to_the_topic_are_left_alone(
    drain: Callable[[], list[dict[str, Any]]], backbone_settings: Settings, keyring: Keyring
) -> None:
    kafka = backbone_settings.kafka
    with admin_client(kafka) as admin:
        admin.create_partitions({kafka.topic: NewPartitions(kafka.partitions + 2)})
        wait_until(lambda: partition_count(admin, kafka.topic) == kafka.partitions + 2, what="the partitions")
    producer = KafkaProducer(**client_options(kafka))
    producer.send(kafka.topic, value=b"foreign", partition=kafka.partitions + 1).get(20)
    producer.close()
    append_all(backbone_settings, [registration(JOB, keyring), event(JOB, 1, "started")])
    rows = drain()
    assert {row["partition"] for row in rows} <= set(range(kafka.partitions))
    assert [row["verdict"] for row in rows if row["stream_id"] == JOB] == ["accepted", "accepted"]
