"""Reads the one topic's tail for the live view: a Kafka consumer without a group, from given offsets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kafka import KafkaConsumer, TopicPartition  # type: ignore[import-untyped]
from kafka.errors import KafkaError, OffsetOutOfRangeError  # type: ignore[import-untyped]

from connectors.kafka_repairs import repair_kafka_client
from schemas.event_topic import REACH_TIMEOUT_S, reach_kafka
from schemas.kafka_clients import client_security, unreachable
from schemas.settings import KafkaSettings

# Few enough that the first of a full poll does not wait long for its verdict.
POLL_RECORDS: Final = 500
_REQUEST_TIMEOUT_MS: Final = 10_000


def consumer_options(kafka: KafkaSettings) -> dict[str, Any]:
    """What the consumers of live view and reactor have in common."""
    repair_kafka_client()
    return {
        "bootstrap_servers": kafka.bootstrap_servers,
        **client_security(kafka),
        "enable_auto_commit": False,
        "bootstrap_timeout_ms": int(REACH_TIMEOUT_S * 1000),
        "request_timeout_ms": _REQUEST_TIMEOUT_MS,
        "reconnect_backoff_max_ms": 1000,
        "fetch_min_bytes": 1,
        "fetch_max_wait_ms": 500,
        "max_partition_fetch_bytes": max(1024 * 1024, kafka.record_limit_bytes),
        "max_poll_records": POLL_RECORDS,
        # kafka-python's CRC is Python, 60 ns a byte; the log's bytes are checked by Spark, too.
        "check_crcs": False,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
    }


@contextmanager
def tail_consumer(kafka: KafkaSettings, offsets: Mapping[int, int]) -> Iterator[Any]:
    """A consumer of every partition from `offsets` on (a partition that is absent: from 0).

    Its `poll` raises OffsetOutOfRangeError when the log does not have an offset. Raises BackboneUnreachable.
    """
    reach_kafka(kafka)
    try:
        consumer = KafkaConsumer(
            client_id="trunkline-live-view",
            group_id=None,
            auto_offset_reset="none",
            **consumer_options(kafka),
        )
        try:
            consumer.assign([TopicPartition(kafka.topic, number) for number in range(kafka.partitions)])
            for number in range(kafka.partitions):
                consumer.seek(TopicPartition(kafka.topic, number), offsets.get(number, 0))
            yield consumer
        finally:
            consumer.close(autocommit=False)
    except OffsetOutOfRangeError:
        raise
    except KafkaError as error:
        raise unreachable(kafka, error) from error


class LogEnd:
    """Asks Kafka where the log ends, over a connection of its own that is kept. Thread-safe."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._lock = threading.Lock()
        self._consumer: Any = None

    def offsets(self, timeout_s: float) -> dict[int, int]:
        """The next offset of every partition. Raises BackboneUnreachable, also after `timeout_s`."""
        wanted = [TopicPartition(self._kafka.topic, number) for number in range(self._kafka.partitions)]
        deadline = time.monotonic() + timeout_s
        with self._lock:
            try:
                if self._consumer is None:
                    reach_kafka(self._kafka, timeout_s)
                    self._consumer = KafkaConsumer(
                        client_id="trunkline-log-end",
                        group_id=None,
                        **consumer_options(self._kafka) | {"bootstrap_timeout_ms": _ms_until(deadline)},
                    )
                ends = self._consumer.end_offsets(wanted, timeout_ms=_ms_until(deadline))
            except KafkaError as error:
                self._drop()
                raise unreachable(self._kafka, error) from error
        return {where.partition: end for where, end in ends.items()}

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._consumer is not None:
            self._consumer.close(autocommit=False, timeout_ms=1000)
            self._consumer = None


def _ms_until(deadline: float) -> int:
    return max(1, int((deadline - time.monotonic()) * 1000))
