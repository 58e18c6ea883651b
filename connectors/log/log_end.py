"""Asks Kafka where the log ends.

A reader that has read up to these offsets has seen every record that was acknowledged before the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from connectors.log.kafka_libraries import client_options
from connectors.log.topic_consumer import LogTail, OffsetsGoneError
from connectors.plumbing.network.rates import Backoff
from schemas.log_access.event_topic import check_topic, reach_kafka
from schemas.log_access.kafka_clients import librdkafka_unreachable
from schemas.settings.settings import KafkaSettings, Settings
from trunkline_agent.errors import BackboneUnreachable

# After so long without an answer, check whether any broker accepts a connection.
_LOOK_S: Final = 1.0
_REACH_S: Final = 2.0
_LEAST_S: Final = 0.001
# How long `record_ends` waits for the ends, for the records before them, and in each poll.
_ENDS_S: Final = 10.0
_RECORDS_S: Final = 20.0
_POLL_S: Final = 0.2
# Errors that another attempt does not change.
_FINAL: Final = (KafkaError._AUTHENTICATION, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._INVALID_ARG)


class LogEnd:
    """A client that asks Kafka for the end of the log. Thread-safe; end it with `close`.

    It keeps its own connection and uses librdkafka (decision 0023): kafka-python took 4 to 20 ms in a gateway
    under load.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._lock = threading.Lock()
        self._client: AdminClient | None = None
        self._refusal: KafkaError | None = None
        newest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        self._wanted = {Partition(kafka.topic, number): newest for number in range(kafka.partitions)}

    def offsets(self, timeout_s: float) -> dict[int, int]:
        """Return the offset that the next record of each partition will get, by partition.

        The call retries while a partition has no leader, and blocks for about `timeout_s` seconds at most.

        Raises:
            BackboneUnreachable: Kafka did not answer in time. It is raised earlier if no broker accepts a
                connection or access is denied.
        """
        deadline, backoff = time.monotonic() + timeout_s, Backoff()
        if not self._lock.acquire(timeout=timeout_s):
            raise self._too_slow(timeout_s)
        try:
            while True:
                try:
                    return self._ask(deadline)
                except TimeoutError:
                    raise self._too_slow(timeout_s) from None
                except KafkaException as error:
                    # The old client keeps its idea of the leaders, even after a broker was restarted.
                    self._client, pause_s = None, backoff.next_s()
                    why: KafkaError = self._refusal or error.args[0]
                    if why.code() in _FINAL or time.monotonic() + pause_s > deadline:
                        where = f", topic {self._kafka.topic!r}"
                        raise librdkafka_unreachable(self._kafka, why, where) from error
                time.sleep(pause_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection to Kafka. A later call of `offsets` would open a new one."""
        with self._lock:
            self._client = None

    def _ask(self, deadline: float) -> dict[int, int]:
        # No local variable refers to the client. The frame of an error would keep it and its threads alive
        # until the next garbage collection.
        if self._client is None:
            self._check_reachable()
            options = client_options(self._kafka) | {"client.id": "trunkline-log-end"}
            self._client = AdminClient(options | {"error_cb": self._on_error})
        self._client.poll(0)  # handle earlier events first
        self._refusal = None
        answers: dict[Any, Future[Any]] = self._client.list_offsets(
            self._wanted, request_timeout=_left(deadline)
        )
        if wait(answers.values(), min(_LOOK_S, _left(deadline))).not_done:
            self._check_reachable()
            self._client.poll(0)
            if self._refusal is not None:
                raise KafkaException(self._refusal)
        try:
            found = {where.partition: one.result(_left(deadline)).offset for where, one in answers.items()}
        finally:
            self._client.poll(0)
        if min(found.values()) < 0:  # the client's sign that a broker did not answer in time
            raise TimeoutError
        return found

    def _check_reachable(self) -> None:
        """Raise BackboneUnreachable if no broker accepts a connection; the next call then uses a new client."""
        try:
            reach_kafka(self._kafka, _REACH_S)
        except BackboneUnreachable:
            self._client = None
            raise

    def _too_slow(self, timeout_s: float) -> BackboneUnreachable:
        servers = self._kafka.bootstrap_servers
        return BackboneUnreachable(f"Kafka at {servers} did not say within {timeout_s:g} s where the log ends")

    def _on_error(self, error: KafkaError) -> None:
        # Called within `poll`. Requests report all other errors themselves.
        if error.code() == KafkaError._AUTHENTICATION:
            self._refusal = error


def _left(until: float) -> float:
    return max(_LEAST_S, until - time.monotonic())


def record_ends(settings: Settings, settled: Mapping[int, int]) -> dict[int, int]:
    """Return the offset that a program must reach in each partition to have settled all records.

    This is the log's end, with one exception: the end of a transaction takes an offset without being a record.
    If only such offsets follow the offset in `settled`, the result is the one in `settled`. The call may block
    for 30 s to find that out; after that time, the result is the log's end.

    Args:
        settings: The settings of Kafka.
        settled: The offset up to which the program has settled each partition; 0 for partitions that are not
            named.

    Raises:
        TrunklineError: Kafka does not answer (BackboneUnreachable), or the topic does not fit the settings.
    """
    check_topic(settings)
    with closing(LogEnd(settings.kafka)) as log_end:
        ends = log_end.offsets(_ENDS_S)
    behind = {number: settled.get(number, 0) for number, end in ends.items() if settled.get(number, 0) < end}
    return ends | (_without_records(settings.kafka, behind, ends) if behind else {})


def _without_records(
    kafka: KafkaSettings, behind: Mapping[int, int], ends: Mapping[int, int]
) -> dict[int, int]:
    """Return the part of `behind` after which the log has no record, as far as that can be read in time."""
    found: dict[int, int] = {}
    unseen, deadline = set(behind), time.monotonic() + _RECORDS_S
    # Offsets that the log no longer has were records.
    with LogTail(kafka, {**ends, **behind}) as tail, suppress(OffsetsGoneError):
        while unseen and time.monotonic() < deadline:
            unseen -= {record.partition for record in tail.poll(_POLL_S)}
            found |= {n: behind[n] for n in unseen if tail.reached.get(n, 0) >= ends[n]}
            unseen -= found.keys()
    return found
