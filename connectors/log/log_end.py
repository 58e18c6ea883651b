"""Where the log ends now: what whoever wants to see all that others were answered for asks first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from schemas.errors import BackboneUnreachable
from schemas.log_access.event_topic import reach_kafka
from schemas.log_access.kafka_clients import SILENT, librdkafka_options, librdkafka_unreachable
from schemas.settings.settings import KafkaSettings

# So long an answer is waited for before it is looked whether anybody is there at all.
_LOOK_S: Final = 1.0
_REACH_S: Final = 2.0
_AGAIN_S: Final = 0.1
_AGAIN_MOST_S: Final = 1.0
_LEAST_S: Final = 0.001
# What another attempt does not change.
_FINAL: Final = (KafkaError._AUTHENTICATION, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._INVALID_ARG)


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

        Raises BackboneUnreachable: soon when nobody is there or we may not ask, else after `timeout_s`.
        """
        deadline, pause_s = time.monotonic() + timeout_s, _AGAIN_S
        if not self._lock.acquire(timeout=timeout_s):
            raise self._too_slow(timeout_s)
        try:
            while True:
                try:
                    return self._asked(deadline)
                except TimeoutError:
                    raise self._too_slow(timeout_s) from None
                except KafkaException as error:
                    # It keeps to what it knows of the leaders, also after a broker was started anew.
                    self._client = None
                    why: KafkaError = self._refusal or error.args[0]
                    if why.code() in _FINAL or time.monotonic() + pause_s > deadline:
                        where = f", topic {self._kafka.topic!r}"
                        raise librdkafka_unreachable(self._kafka, why, where) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MOST_S)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._client = None

    def _asked(self, deadline: float) -> dict[int, int]:
        # No variable holds the client: in an error's frame it and its threads would live until the collector
        # comes by.
        if self._client is None:
            self._look()
            self._client = AdminClient(_options(self._kafka) | {"error_cb": self._hear})
        self._client.poll(0)  # what it has to say of before
        self._refusal = None
        answers: dict[Any, Future[Any]] = self._client.list_offsets(
            self._wanted, request_timeout=_left(deadline)
        )
        if wait(answers.values(), min(_LOOK_S, _left(deadline))).not_done:
            self._look()
            self._client.poll(0)
            if self._refusal is not None:
                raise KafkaException(self._refusal)
        try:
            found = {where.partition: one.result(_left(deadline)).offset for where, one in answers.items()}
        finally:
            self._client.poll(0)
        if min(found.values()) < 0:  # so it tells that a broker did not answer in time
            raise TimeoutError
        return found

    def _look(self) -> None:
        """Raise BackboneUnreachable when nobody is there; the next who asks does so by a new client."""
        try:
            reach_kafka(self._kafka, _REACH_S)
        except BackboneUnreachable:
            self._client = None
            raise

    def _too_slow(self, timeout_s: float) -> BackboneUnreachable:
        servers = self._kafka.bootstrap_servers
        return BackboneUnreachable(f"Kafka at {servers} did not say within {timeout_s:g} s where the log ends")

    def _hear(self, error: KafkaError) -> None:
        # Within `poll`. What failed says all else by itself.
        if error.code() == KafkaError._AUTHENTICATION:
            self._refusal = error


def _options(kafka: KafkaSettings) -> dict[str, Any]:
    """What the client is told (librdkafka's CONFIGURATION.md has the names)."""
    return {
        **librdkafka_options(kafka),
        "client.id": "trunkline-log-end",
        "reconnect.backoff.max.ms": 1000,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        # What it has to say comes to `error_cb`; else it would write to stderr.
        "logger": SILENT,
    }


def _left(until: float) -> float:
    return max(_LEAST_S, until - time.monotonic())
