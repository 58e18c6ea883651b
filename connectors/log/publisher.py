"""The publisher: the only Kafka producer. Every record of every door goes through here.

**Delivers** each record at least once, records of one stream in the order of their `append` calls.
**Acknowledges when** all in-sync replicas have the record (`acks=all`, idempotent producer).
**Loses when** never silently: a future that fails means that the record may or may not be in the log, and
the caller sends it again through a new publisher.

A publisher that has failed once stays failed: the records behind one that has timed out are not sent, or a
job's end would overtake the progress before it.

The client is confluent-kafka, which does Kafka's work outside the interpreter (decision 0023).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer

from schemas.errors import BackboneUnreachable, Refused, TrunklineError
from schemas.log_access.event_topic import REACH_TIMEOUT_S, partition_for, reach_kafka
from schemas.log_access.kafka_clients import SILENT, librdkafka_options, librdkafka_unreachable
from schemas.settings.settings import KafkaSettings, Settings
from schemas.wire.record import OVERSIZE_PREFIX_BYTES, OutgoingRecord, oversized

OUTSTANDING_LIMIT_BYTES: Final = 64 * 1024 * 1024
_RECORD_OVERHEAD_BYTES: Final = 512
# How long one waits for Kafka's answers at once, at most.
_TICK_S: Final = 0.1
_STOP_S: Final = 2.0
_METADATA_S: Final = 1.0
# A longer record travels alone. What the broker refuses is a batch: so it is known whose fault it was.
_BATCH_BYTES: Final = 16 * 1024
# What the broker counts beside the record itself: the head of a batch of one.
_BATCH_HEAD_BYTES: Final = 64
_OF_THE_RECORD: Final = (
    KafkaError.INVALID_RECORD,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
)
_NO_TOPIC: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
_PURGED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
_Answered = Callable[[KafkaError | None, Any], None]


class Position(msgspec.Struct, frozen=True, order=True, gc=False):
    """Where a record lies in the log. Ordered by partition, then offset."""

    partition: int
    offset: int

    def __iter__(self) -> Iterator[int]:
        """Partition and offset."""
        yield self.partition
        yield self.offset


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
        self._said: KafkaError | None = None
        reach_kafka(kafka)
        self._producer: Any = Producer(
            producer_options(kafka, linger_ms=linger_ms, in_flight=in_flight) | {"error_cb": self._hear}
        )
        self._fetch_metadata()
        self._service = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._service.start()

    def append(self, record: OutgoingRecord) -> Append:
        """Hand `record` over; one that is too long is cut (`oversized`).

        Blocks while 64 MiB wait to be sent. Never raises for Kafka's sake: the result carries the error,
        so that a caller has one place for it.
        """
        record = oversized(record, self._cut_beyond)
        size = len(record.value) + _RECORD_OVERHEAD_BYTES
        append = Append()
        append.set_running_or_notify_cancel()

        def answered(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self._fail(KafkaException(error))
            self._give_room(size)
            with suppress(InvalidStateError):  # overdue, and told so already
                if error is None:
                    append.set_result(Position(message.partition(), message.offset()))
                elif error.code() in _PURGED or len(record.value) <= _BATCH_BYTES:
                    append.set_exception(self._unreachable(self._failure))
                else:
                    append.set_exception(self._reason(KafkaException(error)))

        with self._order:
            if not self._take_room(size):
                self._fail(self._failure or TimeoutError("too much waits to be sent"))
                append.set_exception(self._unreachable(self._failure))
                return append
            try:
                with self._room:  # a failure comes before this or after it, and purges what was handed over
                    if self._failure is not None:
                        raise self._failure
                    self._send(record, answered)
            except (KafkaException, BufferError, ValueError, TimeoutError) as error:
                self._give_room(size)
                why = self._reason(error)
                if not isinstance(why, RecordRefused):
                    self._fail(error)
                append.set_exception(why)
                return append
            self._promised.append((time.monotonic() + self._kafka.delivery_timeout_s, append))
        return append

    def has_room(self, record: OutgoingRecord) -> bool:
        """Whether `append` would not block now."""
        size = len(record.value) + _RECORD_OVERHEAD_BYTES
        return self._failure is not None or self._outstanding_bytes + size <= OUTSTANDING_LIMIT_BYTES

    def append_cut(self, record: OutgoingRecord) -> Append:
        """`append` of what travels of an over-long body: for a record that Kafka refused whole."""
        limit = min(OVERSIZE_PREFIX_BYTES, max(0, len(record.value) - 1))
        return self.append(oversized(record, limit))

    def has_topic(self, timeout_s: float) -> bool:
        """Ask Kafka whether the topic exists. Raises BackboneUnreachable if it does not answer in time."""
        try:
            found = self._producer.list_topics(self._kafka.topic, timeout=timeout_s)
        except KafkaException as error:
            raise self._unreachable(error) from error
        why = found.topics[self._kafka.topic].error
        return why is None or why.code() not in _NO_TOPIC

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
        self._service.join(_STOP_S + 2 * _TICK_S)
        if not self._service.is_alive():
            self._producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """Take in Kafka's answers until closed, and fail when one is overdue."""
        while not self._closed.is_set() or (self._outstanding_bytes and self._failure is None):
            self._poll()
            while self._promised and self._promised[0][1].done():
                self._promised.popleft()
            if self._promised and self._promised[0][0] < time.monotonic():
                self._fail(TimeoutError(f"no answer within {self._kafka.delivery_timeout_s:g} s"))
            if self._failure is not None:
                break
        if self._failure is not None:
            self._tell_all(self._failure)

    def _tell_all(self, failure: Exception) -> None:
        deadline = time.monotonic() + _STOP_S
        while len(self._producer) and time.monotonic() < deadline:
            self._poll()
        for _, append in list(self._promised):
            with suppress(InvalidStateError):
                append.set_exception(self._unreachable(failure))

    def _poll(self) -> None:
        try:
            self._producer.poll(_TICK_S)
        except KafkaException as error:  # the client has given up
            self._fail(error)

    def _hear(self, error: KafkaError) -> None:
        """The client tells of a trouble; on whichever thread polls. It goes on by itself unless it is fatal."""
        self._said = error
        if error.fatal():
            self._fail(KafkaException(error))

    def _fetch_metadata(self) -> None:
        # Without it the first append would wait for it, and a refused login would be found out only then.
        deadline = time.monotonic() + REACH_TIMEOUT_S
        while True:
            why: KafkaError | None = None
            try:
                found = self._producer.list_topics(self._kafka.topic, timeout=_METADATA_S)
                why = found.topics[self._kafka.topic].error
                if why is None:
                    return
            except KafkaException as error:
                why = error.args[0]
            self._producer.poll(_TICK_S)  # also a pause: that a topic is missing is answered at once
            is_login = self._said is not None and self._said.code() == KafkaError._AUTHENTICATION
            if is_login or time.monotonic() > deadline:
                self._producer.close()  # else its threads stay until the collector comes by
                raise librdkafka_unreachable(self._kafka, self._said or why, f", topic {self._kafka.topic!r}")

    def _send(self, record: OutgoingRecord, answered: _Answered) -> None:
        self._producer.produce(
            self._kafka.topic,
            key=record.key,
            value=record.value,
            headers=record.headers(),
            partition=partition_for(record.key, self._kafka.partitions),
            on_delivery=answered,
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
            if self._failure is not None:
                return
            self._failure = error
            self._room.notify_all()
        # What waits is not sent any more; each is answered by the client with an error of its own.
        with suppress(KafkaException):  # it has given up already
            self._producer.purge(blocking=False)

    def _reason(self, error: Exception) -> TrunklineError:
        """What a caller is told: whether it is the record's fault or Kafka's."""
        is_record = isinstance(error, KafkaException) and error.args[0].code() in _OF_THE_RECORD
        if not is_record:
            return self._unreachable(error)
        found = RecordRefused(f"Kafka refused the record: {error.args[0].str()}")
        found.__cause__ = error
        return found

    def _unreachable(self, error: Exception | None) -> BackboneUnreachable:
        found = BackboneUnreachable(
            f"Kafka at {self._kafka.bootstrap_servers} did not take the record: {_told(error)}"
        )
        found.__cause__ = error
        return found


def _told(error: Exception | None) -> str:
    """What an error says; librdkafka's exceptions hold an object that does."""
    if isinstance(error, KafkaException):
        return str(error.args[0].str())
    return str(error or "too slow")


def producer_options(kafka: KafkaSettings, *, linger_ms: int, in_flight: int) -> dict[str, Any]:
    """What the client is told (librdkafka's CONFIGURATION.md has the names)."""
    delivery_ms = int(kafka.delivery_timeout_s * 1000)
    return {
        **librdkafka_options(kafka),
        "client.id": "trunkline-publisher",
        "enable.idempotence": True,
        # A record that is given up stops the producer: none behind it overtakes it. That does not hold for
        # librdkafka's own time-out, so the deadlines are ours (`_serve`), and end all that waits.
        "enable.gapless.guarantee": True,
        "message.timeout.ms": 0,
        "acks": "all",
        "linger.ms": linger_ms,
        "max.in.flight.requests.per.connection": in_flight,
        "request.timeout.ms": max(100, min(delivery_ms // 2, 10_000)),
        "socket.timeout.ms": 10_000,
        "message.max.bytes": kafka.record_limit_bytes - _BATCH_HEAD_BYTES,
        "batch.size": _BATCH_BYTES,
        # The limit on what waits is ours, in bytes; these only have to be above it.
        "queue.buffering.max.messages": 0,
        "queue.buffering.max.kbytes": 4 * OUTSTANDING_LIMIT_BYTES // 1024,
        "reconnect.backoff.max.ms": 1000,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        # What it has to say comes to `error_cb`; else it would write to stderr.
        "logger": SILENT,
    }
