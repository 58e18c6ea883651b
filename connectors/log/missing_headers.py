"""Headers that librdkafka's consumer cannot return, read by kafka-python, which is slower and rarely needed."""

from __future__ import annotations

import time
from typing import Any, Final

from kafka import KafkaConsumer, TopicPartition  # type: ignore[import-untyped]
from kafka.errors import KafkaError  # type: ignore[import-untyped]

from connectors.log.kafka_records import to_record
from connectors.log.kafka_repairs import repair_kafka_client
from schemas.errors import BackboneUnreachable
from schemas.log_access.event_topic import REACH_TIMEOUT_S, reach_kafka
from schemas.log_access.kafka_clients import client_options, unreachable
from schemas.settings.settings import KafkaSettings
from schemas.wire.record import Record

_POLL_RECORDS: Final = 500


def with_all_headers(kafka: KafkaSettings, found: list[Record]) -> list[Record]:
    """Return the records, with their headers where librdkafka returned none.

    It returns none for more than 100,000 headers, and for some encodings that Java reads. Our own records
    always have headers, so records without any are rare. Raises BackboneUnreachable.
    """
    bare = [record for record in found if not record.header_names]
    for partition in {record.partition for record in bare}:
        offsets = [record.offset for record in bare if record.partition == partition]
        read = records_between(kafka, partition, offsets[0], offsets[-1])
        found = [
            read.get(one.offset, one) if one.partition == partition and not one.header_names else one
            for one in found
        ]
    return found


def records_between(kafka: KafkaSettings, partition: int, first: int, last: int) -> dict[int, Record]:
    """Return the records of a partition from offset `first` to `last`, by offset, read by kafka-python.

    Raises BackboneUnreachable, also if they do not arrive within REACH_TIMEOUT_S.
    """
    where = TopicPartition(kafka.topic, partition)
    found: dict[int, Record] = {}
    deadline = time.monotonic() + REACH_TIMEOUT_S
    reach_kafka(kafka)
    try:
        consumer = KafkaConsumer(
            client_id="trunkline-headers", group_id=None, auto_offset_reset="none", **consumer_options(kafka)
        )
        try:
            consumer.assign([where])
            consumer.seek(where, first)
            while consumer.position(where) <= last:
                if time.monotonic() > deadline:
                    raise BackboneUnreachable(
                        f"offsets {first} to {last} of partition {partition} did not come"
                    )
                for batch in consumer.poll(timeout_ms=200).values():
                    found |= {one.offset: to_record(one) for one in batch}
        finally:
            consumer.close(autocommit=False)
    except KafkaError as error:
        raise unreachable(kafka, error) from error
    return found


def consumer_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Return the options of a consumer of kafka-python that reads the topic."""
    repair_kafka_client()
    return {
        **client_options(kafka),
        "enable_auto_commit": False,
        "bootstrap_timeout_ms": int(REACH_TIMEOUT_S * 1000),
        "request_timeout_ms": 10_000,
        "reconnect_backoff_max_ms": 1000,
        "fetch_min_bytes": 1,
        "fetch_max_wait_ms": 500,
        "max_partition_fetch_bytes": max(1024 * 1024, kafka.record_limit_bytes),
        "max_poll_records": _POLL_RECORDS,
        # kafka-python computes the CRC in Python, 60 ns a byte. Spark checks the log's bytes, too.
        "check_crcs": False,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
    }
