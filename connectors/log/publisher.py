"""The publisher: the only Kafka producer, through which every record of every door passes.

**Delivers** each record at least once, and the records of one stream in the order of their `append` calls.
**Acknowledges when** all in-sync replicas have the record (`acks=all`, idempotent producer).
**Loses when** never silently. If a future fails, the record may or may not be in the log, and the caller sends
it again through a new publisher.

A publisher that has failed once stays failed. It does not send the records behind one that timed out: otherwise
a job's end could overtake the progress before it.

The client is confluent-kafka, which works outside the interpreter (decision 0023).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final, Self

from confluent_kafka import KafkaError, KafkaException, Producer

from connectors.log.kafka_libraries import BATCH_BYTES, OUTSTANDING_LIMIT_BYTES, producer_options
from connectors.log.shared_records import OwnRecord, OwnRecords
from schemas.keys.record_macs import GATEWAY, load_mac_key, mac_headers
from schemas.log_access.event_topic import REACH_TIMEOUT_S, reach_kafka
from schemas.log_access.kafka_clients import librdkafka_unreachable
from schemas.settings.settings import Settings
from schemas.wire.record import OVERSIZE_PREFIX_BYTES, OutgoingRecord, Position, oversized, partition_for
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError

_RECORD_OVERHEAD_BYTES: Final = 512
# The longest single wait for Kafka's answers.
_TICK_S: Final = 0.1
# How often errors are looked for where the records come back (`own`).
_PAUSE_S: Final = 0.02
_STOP_S: Final = 2.0
_METADATA_S: Final = 1.0
_OF_THE_RECORD: Final = (
    KafkaError.INVALID_RECORD,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
)
_NO_TOPIC: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
_PURGED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
_Answered = Callable[[KafkaError | None, Any], None]


class RecordRefused(Refused):
    """Kafka refused this one record because of its size or form. Sending it again will not help."""


class Append(Future[Position]):
    """The future of one append: its result is the position of the record in the log.

    Callbacks run on the publisher's thread, or where the log is read. For each partition they run in the order
    of the log.
    """

    def came_back(self, found: Any) -> None:
        """Set the result to the position of the record that came back, or to the error in its place."""
        with suppress(InvalidStateError):
            if isinstance(found, Exception):
                self.set_exception(found)
            else:
                self.set_result(found.position)

    def result(self, timeout: float | None = None) -> Position:
        """Wait until Kafka has acknowledged the record, and return its position.

        Args:
            timeout: Wait at most this many seconds. None: until the publisher's delivery timeout.

        Raises:
            RecordRefused: Kafka refused this record.
            BackboneUnreachable: Kafka did not acknowledge the record in time. It may or may not be in the log.
        """
        try:
            return super().result(timeout)
        except TimeoutError:
            raise BackboneUnreachable(f"Kafka did not acknowledge within {timeout} s") from None


_Promise = Append | OwnRecord


class Publisher:
    """A Kafka producer for the one topic. Thread-safe; use it as a context manager, or end it with `close`.

    Args:
        settings: The settings of Kafka and the payload limit.
        linger_ms: How long a record waits for others, to be sent together; 0 sends each at once.
        signer: The signer whose key makes the MACs of the records, one of `schemas.keys.record_macs.SIGNERS`.
        cut_beyond: A value of more bytes is cut to its first KiB. None: `limits.payload_bytes`.
        own: The records of this process that a reader of the log waits for. A record counts as stored when it
            has come back from there, which costs less than Kafka's acknowledgement. None: it is acknowledged.

    Raises:
        BackboneUnreachable: Kafka cannot be reached within 10 s.
        SettingsError: There is no key for MACs.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        signer: str = GATEWAY,
        linger_ms: int = 0,
        cut_beyond: int | None = None,
        own: OwnRecords | None = None,
    ) -> None:
        kafka = settings.kafka
        self._own = own
        self._mac_key = load_mac_key(settings, signer)
        self._kafka = kafka
        self._cut_beyond = settings.limits.payload_bytes if cut_beyond is None else cut_beyond
        self._room = threading.Condition()
        self._outstanding_bytes = 0
        self._blocked = 0  # calls that wait for room
        self._failure: Exception | None = None
        # Held while a record is handed over, so that two threads cannot swap their records.
        self._order = threading.Lock()
        self._pending: deque[tuple[float, _Promise]] = deque()  # with its deadline, oldest first
        self._closed = threading.Event()
        self._client_error: KafkaError | None = None
        reach_kafka(kafka)
        options = producer_options(kafka, linger_ms=linger_ms)
        options["delivery.report.only.error"] = own is not None
        self._producer: Any = Producer(options | {"error_cb": self._on_error})
        self._fetch_metadata()
        self._service = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._service.start()

    def append(self, record: OutgoingRecord) -> Append:
        """Send `record` to Kafka, and return a future of its position in the log.

        The call blocks while 64 MiB wait to be sent, for at most `kafka.delivery_timeout_s`. After that time
        the publisher fails, and all later appends with it. A value that is longer than `cut_beyond` is cut to
        its first KiB, and the fold rejects the record as `too_large`. Only the future raises errors of Kafka.
        """
        append = Append()
        append.set_running_or_notify_cancel()
        if self._own is not None:
            self.send(record, append.came_back)
            return append
        record = oversized(record, self._cut_beyond)
        size = len(record.value) + _RECORD_OVERHEAD_BYTES

        def answered(error: KafkaError | None, message: Any) -> None:
            if error is None and message.offset() is None:
                # Kafka calls the record a repetition of one that it has, and does not say where that is.
                error = KafkaError(KafkaError.DUPLICATE_SEQUENCE_NUMBER)
            if error is not None:
                self._refused(append, record, size, error)
                return
            self._give_room(size)
            with suppress(InvalidStateError):  # overdue, and already failed
                append.set_result(Position(message.partition(), message.offset()))

        self._hand_over(append, record, size, answered)
        return append

    def send(self, record: OutgoingRecord, done: Callable[[Any], None], *, may_block: bool = True) -> bool:
        """Send `record` to Kafka, and call `done` once: with what the reader made of it, or with an error.

        The reader calls it when the record has come back (`own`), or this publisher's thread, or this method.
        Otherwise as `append`. Without `may_block`, False, and nothing is sent, if the call would have to wait.
        """
        record = oversized(record, self._cut_beyond)
        size = len(record.value) + _RECORD_OVERHEAD_BYTES
        sent = OwnRecord(done, lambda: self._give_room(size))

        def answered(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self._refused(sent, record, size, error)

        return self._hand_over(sent, record, size, answered, may_block)

    def _refused(self, promise: _Promise, record: OutgoingRecord, size: int, error: KafkaError) -> None:
        """Handle an error of Kafka for one record."""
        self._fail(KafkaException(error))
        if not promise.done():
            self._give_room(size)
        with suppress(InvalidStateError):  # overdue, and already failed
            if error.code() in _PURGED or len(record.value) <= BATCH_BYTES:
                promise.set_exception(self._unreachable(self._failure))
            else:
                promise.set_exception(self._reason(KafkaException(error)))

    def _hand_over(
        self, promise: _Promise, record: OutgoingRecord, size: int, answered: _Answered, may_block: bool = True
    ) -> bool:
        if not self._take_room(size, may_block):
            if self._failure is None and not may_block:
                return False
            self._fail(self._failure or TimeoutError("too much waits to be sent"))
            promise.set_exception(self._unreachable(self._failure))
            return True
        with self._order:  # but not while somebody is told, who may send the next record at once
            error = self._produced(promise, record, answered)
        if error is not None:
            self._give_room(size)
            if isinstance(error, KafkaException) and error.args[0].code() == KafkaError._FATAL:
                with self._room:  # the reason comes to `_on_error`, perhaps only now
                    self._room.wait_for(lambda: self._failure is not None, _STOP_S)
                error = self._failure or error
            if not isinstance(why := self._reason(error), RecordRefused):
                self._fail(error)
            promise.set_exception(why)
        return True

    def _produced(self, promise: _Promise, record: OutgoingRecord, answered: _Answered) -> Exception | None:
        """Give a record to the producer. Return the error if it does not take it."""
        try:
            with self._room:  # a failure happens before this or after it, and purges the producer's queue
                if self._failure is not None:
                    raise self._failure
                self._send(record, answered, promise)
        except (KafkaException, BufferError, ValueError, TimeoutError) as error:
            return error
        self._pending.append((time.monotonic() + self._kafka.delivery_timeout_s, promise))
        return None

    def append_cut(self, record: OutgoingRecord) -> Append:
        """Append only the first KiB of a record that Kafka has refused for its size, and return its future."""
        limit = min(OVERSIZE_PREFIX_BYTES, max(0, len(record.value) - 1))
        return self.append(oversized(record, limit))

    def has_topic(self, timeout_s: float) -> bool:
        """Return whether Kafka has the topic. Raises BackboneUnreachable if Kafka is silent for `timeout_s`."""
        try:
            found = self._producer.list_topics(self._kafka.topic, timeout=timeout_s)
        except KafkaException as error:
            raise self._unreachable(error) from error
        why = found.topics[self._kafka.topic].error
        return why is None or why.code() not in _NO_TOPIC

    @property
    def failed(self) -> bool:
        """True if an append failed. Then this publisher sends no more records, and every append fails."""
        return self._failure is not None

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for Kafka's acknowledgements of pending appends, then stop. Nothing is raised.

        Futures without one fail. `timeout_s` is the longest wait in seconds; None: `kafka.delivery_timeout_s`.
        """
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        """Handle Kafka's answers until closed, and fail when one is overdue."""
        while self._failure is None and (not self._closed.is_set() or self._outstanding_bytes):
            self._poll()
            while self._pending and self._pending[0][1].done():
                self._pending.popleft()
            if self._pending and self._pending[0][0] < time.monotonic():
                self._fail(TimeoutError(f"no answer within {self._kafka.delivery_timeout_s:g} s"))
            elif self._own is not None:
                self._closed.wait(_PAUSE_S)
        if self._failure is not None:
            self._fail_pending(self._failure)

    def _fail_pending(self, failure: Exception) -> None:
        deadline = time.monotonic() + _STOP_S
        while len(self._producer) and time.monotonic() < deadline:
            self._poll()
        for _, append in list(self._pending):
            with suppress(InvalidStateError):
                append.set_exception(self._unreachable(failure))

    def _poll(self) -> None:
        try:
            self._producer.poll(_TICK_S)
        except KafkaException as error:  # a fatal error of the client
            self._fail(error)

    def _on_error(self, error: KafkaError) -> None:
        """Note an error of the client, on the thread that polls. The client recovers unless it is fatal."""
        self._client_error = error
        if error.fatal():
            self._fail(KafkaException(error))

    def _fetch_metadata(self) -> None:
        # Otherwise the first append would wait for the metadata, and a refused login would only show then.
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
            self._producer.poll(_TICK_S)  # also a pause: Kafka answers at once that a topic is missing
            known = self._client_error
            is_login = known is not None and known.code() == KafkaError._AUTHENTICATION
            if is_login or time.monotonic() > deadline:
                self._producer.close()  # otherwise its threads live until the next garbage collection
                raise librdkafka_unreachable(self._kafka, known or why, f", topic {self._kafka.topic!r}")

    def _send(self, record: OutgoingRecord, answered: _Answered, promise: _Promise) -> None:
        partition = record.partition
        if partition is None:
            partition = partition_for(record.key, self._kafka.partitions)
        headers = record.headers(mac=mac_headers(record, self._mac_key))
        if self._own is not None and isinstance(promise, OwnRecord):
            # Before Kafka has it, so that it cannot come back too early.
            self._own.expect(partition, promise, tuple([value for _, value in headers]), record.value)
        self._producer.produce(
            self._kafka.topic,
            key=record.key,
            value=record.value,
            headers=headers,
            partition=partition,
            on_delivery=answered,
        )

    def _take_room(self, size: int, may_block: bool) -> bool:
        deadline = time.monotonic() + self._kafka.delivery_timeout_s
        with self._room:
            # Behind those that wait already, or small records would leave no room for a large one.
            if not may_block and self._blocked:
                return False
            while self._failure is None:
                if not self._outstanding_bytes or self._outstanding_bytes + size <= OUTSTANDING_LIMIT_BYTES:
                    self._outstanding_bytes += size
                    return True
                self._blocked += 1
                is_free = may_block and self._room.wait(max(0.0, deadline - time.monotonic()))
                self._blocked -= 1
                if not is_free:
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
        # Waiting records are not sent any more. The client reports an error for each of them.
        with suppress(KafkaException):  # the client has already failed
            self._producer.purge(blocking=False)

    def _reason(self, error: Exception) -> TrunklineError:
        """Return the exception for a caller: whether the record or Kafka caused the failure."""
        if not (isinstance(error, KafkaException) and error.args[0].code() in _OF_THE_RECORD):
            return self._unreachable(error)
        found = RecordRefused(f"Kafka refused the record: {_text_of(error)}")
        found.__cause__ = error
        return found

    def _unreachable(self, error: Exception | None) -> BackboneUnreachable:
        servers = self._kafka.bootstrap_servers
        found = BackboneUnreachable(f"Kafka at {servers} did not take the record: {_text_of(error)}")
        found.__cause__ = error
        return found


def _text_of(error: Exception | None) -> str:
    """Return the text of an error; librdkafka's exceptions hold an object that has it."""
    if isinstance(error, KafkaException):
        return str(error.args[0].str())
    return str(error or "too slow")
