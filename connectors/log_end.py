"""Where the log ends now: what whoever wants to see all that others were answered for asks first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from schemas.event_topic import reach_kafka
from schemas.kafka_clients import SILENT, librdkafka_security, librdkafka_unreachable
from schemas.settings import KafkaSettings

# The client waits for a broker that is gone; another look tells that nobody is there. Twice as long each time.
_PATIENCE_S: Final = 1.0
_AGAIN_S: Final = 0.1
_LEAST_S: Final = 0.001


class LogEnd:
    """Asks Kafka where the log ends, over a connection of its own that is kept. Thread-safe.

    By librdkafka (decision 0023): kafka-python took 4 ms in a gateway under load, and up to 20.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._lock = threading.Lock()
        self._client: AdminClient | None = None
        self._refusal: KafkaError | None = None
        newest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        self._wanted = {Partition(kafka.topic, number): newest for number in range(kafka.partitions)}

    def offsets(self, timeout_s: float) -> dict[int, int]:
        """The next offset of every partition; a partition without a leader is asked for again.

        Raises BackboneUnreachable: at once when nobody is there, else after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        why: KafkaError | None = None
        patience_s = _PATIENCE_S
        with self._lock:
            while True:
                try:
                    return self._asked(min(deadline, time.monotonic() + patience_s))
                except (KafkaException, TimeoutError) as error:
                    self._client = None
                    # The last attempt may end in time without having said anything.
                    why = error.args[0] if isinstance(error, KafkaException) else why
                    if self._refusal is not None or time.monotonic() + _AGAIN_S > deadline:
                        where = f", topic {self._kafka.topic!r}"
                        raise librdkafka_unreachable(self._kafka, self._refusal or why, where) from error
                time.sleep(_AGAIN_S)
                patience_s *= 2

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._client = None

    def _asked(self, until: float) -> dict[int, int]:
        # No variable holds the client: in an error's frame it and its threads would live until the collector
        # comes by.
        if self._client is None:
            reach_kafka(self._kafka, _left(until))
            self._refusal = None
            self._client = AdminClient(_options(self._kafka) | {"error_cb": self._hear})
        try:
            answers: dict[Any, Future[Any]] = self._client.list_offsets(
                self._wanted, request_timeout=_left(until)
            )
            found = {where.partition: one.result(_left(until)).offset for where, one in answers.items()}
        finally:
            self._client.poll(0)  # what it has to say; else it is kept for ever
        if min(found.values()) < 0:  # so it tells that a broker did not answer in time
            raise TimeoutError
        return found

    def _hear(self, error: KafkaError) -> None:
        # Within `poll`. What failed says all else by itself.
        if error.code() == KafkaError._AUTHENTICATION:
            self._refusal = error


def _options(kafka: KafkaSettings) -> dict[str, Any]:
    """What the client is told (librdkafka's CONFIGURATION.md has the names)."""
    return {
        "bootstrap.servers": kafka.bootstrap_servers,
        **librdkafka_security(kafka),
        "client.id": "trunkline-log-end",
        "reconnect.backoff.max.ms": 1000,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        # What it has to say comes to `error_cb`; else it would write to stderr.
        "logger": SILENT,
    }


def _left(until: float) -> float:
    return max(_LEAST_S, until - time.monotonic())
