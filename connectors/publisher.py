"""The publisher: the only Kafka producer. Every record of every door goes through here.

**Delivers** each record at least once, records of one stream in the order of their `append` calls.
**Acknowledges when** all in-sync replicas have the record (`acks=all`, idempotent producer).
**Loses when** never silently: a future that fails means that the record may or may not be in the log, and
the caller sends it again through a new publisher.

A publisher that has failed once stays failed. kafka-python goes on with the records behind one that has
timed out; a job's end would then overtake the progress before it. So the first failure stops the producer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from kafka import KafkaProducer  # type: ignore[import-untyped]
from kafka.errors import (  # type: ignore[import-untyped]
    InvalidRecordError,
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
)

from schemas.errors import BackboneUnreachable, Refused
from schemas.event_topic import REACH_TIMEOUT_S, partition_for, reach_kafka
from schemas.kafka_clients import client_security, unreachable
from schemas.record import OVERSIZE_PREFIX_BYTES, OutgoingRecord, oversized
from schemas.settings import Settings

# kafka-python 3 has no limit of its own on what waits to be sent.
OUTSTANDING_LIMIT_BYTES: Final = 64 * 1024 * 1024
_RECORD_OVERHEAD_BYTES: Final = 512
# How long after the delivery timeout an answer is overdue, and how often that is looked at.
_GRACE_S: Final = 1.0
_WATCH_TICK_S: Final = 0.25
_STOP_S: Final = 2.0
_BATCH_BYTES: Final = 128 * 1024
_OF_THE_RECORD: Final = (InvalidRecordError, MessageSizeTooLargeError, RecordListTooLargeError)


class Position(NamedTuple):
    """Where a record lies in the log."""

    partition: int
    offset: int


class RecordRefused(Refused):
    """Kafka refused this one record for its own sake (size, form). Sending the same again will not help."""


class Append(Future[Position]):
    """The promise of one append. Callbacks run on the producer's thread, in the log's order per partition."""

    def result(self, timeout: float | None = None) -> Position:
        """The record's position. Raises RecordRefused, or BackboneUnreachable, also after `timeout` seconds."""
        try:
            return super().result(timeout)
        except TimeoutError:
            raise BackboneUnreachable(f"Kafka did not acknowledge within {timeout} s") from None


class Publisher:
    """Appends records to the one topic. Thread-safe; use it as a context manager.

    `linger_ms`: how long a record waits for others to travel with; 0 sends each at once. `cut_beyond`: longer
    records are cut, by default at `limits.payload_bytes`. `in_flight`: how many requests to Kafka are under way
    at once; with 1, what comes during a request travels in the next. Raises BackboneUnreachable when Kafka
    cannot be reached within 10 s.
    """

    def __init__(
        self, settings: Settings, *, linger_ms: int = 0, cut_beyond: int | None = None, in_flight: int = 5
    ) -> None:
        kafka = settings.kafka
        self._kafka = kafka
        self._cut_beyond = settings.limits.payload_bytes if cut_beyond is None else cut_beyond
        self._room = threading.Condition()
        self._outstanding_bytes = 0
        self._failure: Exception | None = None
        # Held while a record is handed over, so that two threads cannot swap between cut and send.
        self._order = threading.Lock()
        self._promised: deque[tuple[float, Append]] = deque()  # deadline and promise, oldest first
        self._closed = threading.Event()
        reach_kafka(kafka)
        delivery_ms = int(kafka.delivery_timeout_s * 1000)
        try:
            self._producer: Any = KafkaProducer(
                bootstrap_servers=kafka.bootstrap_servers,
                **client_security(kafka),
                client_id="trunkline-publisher",
                enable_idempotence=True,  # said aloud, so that a conflicting option raises
                acks="all",
                linger_ms=linger_ms,
                max_in_flight_requests_per_connection=in_flight,
                delivery_timeout_ms=delivery_ms,
                request_timeout_ms=max(100, min(delivery_ms // 2, 10_000)),
                max_block_ms=min(delivery_ms, 10_000),
                bootstrap_timeout_ms=int(REACH_TIMEOUT_S * 1000),
                # The size that counts is the broker's limit on a batch; the request around it is longer.
                max_request_size=kafka.record_limit_bytes,
                batch_size=min(_BATCH_BYTES, kafka.record_limit_bytes // 2),
                reconnect_backoff_max_ms=1000,
                allow_auto_create_topics=False,
                metrics_enabled=False,
            )
        except KafkaError as error:
            raise unreachable(kafka, error) from error
        self._fetch_metadata()
        self._watch = threading.Thread(target=self._watch_deadlines, name="publisher-watch", daemon=True)
        self._watch.start()

    def append(self, record: OutgoingRecord) -> Append:
        """Hand `record` over; one that is too long is cut (`oversized`).

        Blocks while 64 MiB wait to be sent. Never raises for Kafka's sake: the result carries the error,
        so that a caller has one place for it.
        """
        record = oversized(record, self._cut_beyond)
        size = len(record.value) + _RECORD_OVERHEAD_BYTES
        append = Append()
        append.set_running_or_notify_cancel()
        with self._order:
            if not self._take_room(size):
                self._fail(self._failure or TimeoutError("too much waits to be sent"))
                append.set_exception(self._unreachable(self._failure))
                return append
            try:
                sent = self._send(record)
            except _OF_THE_RECORD as error:
                self._give_room(size)
                append.set_exception(_refused(error))
                return append
            except (KafkaError, ValueError) as error:
                self._give_room(size)
                self._fail(error)
                append.set_exception(self._unreachable(error))
                return append
            self._promised.append((time.monotonic() + self._kafka.delivery_timeout_s + _GRACE_S, append))

        def acknowledged(metadata: Any) -> None:
            self._give_room(size)
            with suppress(InvalidStateError):  # overdue, and told so already
                append.set_result(Position(metadata.partition, metadata.offset))

        def failed(error: Exception) -> None:
            self._fail(error)
            self._give_room(size)
            refused = isinstance(error, _OF_THE_RECORD)
            with suppress(InvalidStateError):
                append.set_exception(_refused(error) if refused else self._unreachable(error))

        sent.add_callback(acknowledged)
        sent.add_errback(failed)
        return append

    def has_room(self, record: OutgoingRecord) -> bool:
        """Whether `append` would not block now."""
        size = len(record.value) + _RECORD_OVERHEAD_BYTES
        return self._failure is not None or self._outstanding_bytes + size <= OUTSTANDING_LIMIT_BYTES

    def append_cut(self, record: OutgoingRecord) -> Append:
        """`append` of what travels of an over-long body: for a record that Kafka refused whole."""
        limit = min(OVERSIZE_PREFIX_BYTES, max(0, len(record.value) - 1))
        return self.append(oversized(record, limit))

    @property
    def failed(self) -> bool:
        """Whether an append failed: this publisher will not send anything more."""
        return self._failure is not None

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what was appended (at most `timeout_s`, by default the delivery timeout) and end."""
        self._closed.set()
        wait_s = self._kafka.delivery_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait_s
        with self._room:
            while self._outstanding_bytes and self._failure is None and time.monotonic() < deadline:
                self._room.wait(max(0.0, deadline - time.monotonic()))
            left = self._outstanding_bytes
        if left or self._failure is not None:
            self._fail(self._failure or TimeoutError("closed with records that Kafka did not acknowledge"))
            self._producer._sender.join(wait_s)
        # What was not acknowledged has its error in its future already.
        with suppress(KafkaError):
            self._producer.close(timeout=max(1.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch_deadlines(self) -> None:
        """Fail when an answer is overdue. kafka-python 3.0 does not look at its own delivery timeout while it
        waits for a producer id, so with a Kafka that hangs its futures may never be done.
        """
        while not self._closed.wait(_WATCH_TICK_S) and self._failure is None:
            while self._promised and self._promised[0][1].done():
                self._promised.popleft()
            if self._promised and self._promised[0][0] < time.monotonic():
                self._fail(TimeoutError(f"no answer within {self._kafka.delivery_timeout_s:g} s"))
        if self._failure is not None:
            self._producer._sender.join(_STOP_S)  # which tells the others
            for _, append in list(self._promised):
                with suppress(InvalidStateError):
                    append.set_exception(self._unreachable(self._failure))

    def _fetch_metadata(self) -> None:
        # Without it the first append would block its caller, for the bridge the MQTT connection's thread.
        try:
            self._producer.partitions_for(self._kafka.topic)
        except KafkaError as error:
            self._producer._sender.force_close()
            with suppress(KafkaError):
                self._producer.close(timeout=1)
            raise unreachable(self._kafka, error, f", topic {self._kafka.topic!r}") from error

    def _send(self, record: OutgoingRecord) -> Any:
        return self._producer.send(
            self._kafka.topic,
            key=record.key,
            value=record.value,
            headers=record.headers(),
            partition=partition_for(record.key, self._kafka.partitions),
        )

    def _take_room(self, size: int) -> bool:
        deadline = time.monotonic() + self._kafka.delivery_timeout_s
        with self._room:
            while self._failure is None:
                if not self._outstanding_bytes or self._outstanding_bytes + size <= OUTSTANDING_LIMIT_BYTES:
                    self._outstanding_bytes += size
                    return True
                if not self._room.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return False

    def _give_room(self, size: int) -> None:
        with self._room:
            self._outstanding_bytes -= size
            self._room.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._room:
            if self._failure is None:
                self._failure = error
            self._room.notify_all()
        # No public call stops the sender from its own thread without waiting for what is behind the failed
        # record (close() flushes first), and that is what must not be sent.
        self._producer._sender.force_close()

    def _unreachable(self, error: Exception | None) -> BackboneUnreachable:
        found = BackboneUnreachable(
            f"Kafka at {self._kafka.bootstrap_servers} did not take the record: {error or 'too slow'}"
        )
        found.__cause__ = error
        return found


def _refused(error: Exception) -> RecordRefused:
    found = RecordRefused(f"Kafka refused the record: {error}")
    found.__cause__ = error
    return found
