"""Both Kafka client libraries: the options of librdkafka, and the records that the fold reads.

CONFIGURATION.md of librdkafka explains the options. librdkafka is fast, but cannot return some headers.
kafka-python is slower, and reads them all, with the patches at the end of this module.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any, Final

from confluent_kafka import Message
from kafka import TopicPartition  # type: ignore[import-untyped]
from kafka.net.inet import KafkaNetSocket  # type: ignore[import-untyped]
from kafka.record.default_records import DefaultRecordBatch  # type: ignore[import-untyped]

from schemas.log_access.event_topic import REACH_TIMEOUT_S, topic_reader
from schemas.log_access.kafka_clients import SILENT, librdkafka_options
from schemas.settings.settings import KafkaSettings
from schemas.wire.record import NOT_UTF8, Record
from trunkline_agent.errors import BackboneUnreachable

OUTSTANDING_LIMIT_BYTES: Final = 64 * 1024 * 1024
BATCH_BYTES: Final = 16 * 1024
"""A longer record travels alone. The broker refuses whole batches, so it is known which one was refused."""
# The broker counts the head of a batch in addition to the record.
_BATCH_HEAD_BYTES: Final = 64


def client_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Return the options that all librdkafka clients of this project share: addresses, login and behaviour.

    CONFIGURATION.md of librdkafka explains the options.
    """
    return {
        **librdkafka_options(kafka),
        "reconnect.backoff.max.ms": 1000,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        # The client reports to `error_cb`; otherwise it would write to stderr.
        "logger": SILENT,
    }


def producer_options(kafka: KafkaSettings, *, linger_ms: int) -> dict[str, Any]:
    """Return the options of a librdkafka producer, which librdkafka's CONFIGURATION.md explains.

    A record waits `linger_ms` for others, and those that arrive during a request are sent with the next one.
    """
    delivery_ms = int(kafka.delivery_timeout_s * 1000)
    return {
        **client_options(kafka),
        "client.id": "trunkline-publisher",
        "enable.idempotence": True,
        # A failed record stops the producer, so no later record overtakes it. librdkafka's own time-out does
        # not guarantee that. So `_serve` watches the deadlines and fails all waiting records.
        "enable.gapless.guarantee": True,
        "message.timeout.ms": 0,
        "acks": "all",
        "linger.ms": linger_ms,
        # A broker that knows nothing of a producer takes any of its sequence numbers as the first. So if it
        # is not ready for a first request, a second one at the same time may overtake that (decision 0035).
        "max.in.flight.requests.per.connection": 1,
        "request.timeout.ms": max(100, min(delivery_ms // 2, 10_000)),
        "socket.timeout.ms": 10_000,
        "message.max.bytes": kafka.record_limit_bytes - _BATCH_HEAD_BYTES,
        "batch.size": BATCH_BYTES,
        # The publisher limits the waiting bytes itself; the client's limits only have to be higher.
        "queue.buffering.max.messages": 0,
        "queue.buffering.max.kbytes": 4 * OUTSTANDING_LIMIT_BYTES // 1024,
    }


# For a header name that is not UTF-8, this method sets an exception and returns a list with a hole, on which
# the interpreter crashes. `map` checks for the exception after each call; specialised bytecode does not. A
# second call on the same message would return the list without the exception, so each message is asked once.
_HEADERS: Final[Any] = Message.headers


def to_record(consumed: Any) -> Record:
    """Return the Record for `consumed`, a ConsumerRecord of kafka-python."""
    one = consumed
    at = (one.topic, one.partition, one.offset, one.timestamp * 1000)
    return Record(*at, one.key, one.value, *_split(one.headers))


def message_record(message: Any) -> Record:
    """Return the Record for `message`, a confluent_kafka.Message without an error. Call it once per message.

    librdkafka ends a header's name at its first NUL, and so does `read_envelope`. If no header can be read, the
    Record has the single header NOT_UTF8, and the fold rejects it.
    """
    try:
        (headers,) = map(_HEADERS, (message,))
    except (SystemError, UnicodeDecodeError):
        # No header can be read. The fold rejects a record with such a name in any case.
        headers = ((NOT_UTF8, None),)
    at = (message.topic(), message.partition(), message.offset(), message.timestamp()[1] * 1000)
    return Record(*at, message.key(), message.value(), *_split(headers or ()))


def _split(headers: Any) -> tuple[tuple[str, ...], tuple[bytes | None, ...]]:
    # List comprehensions are faster than generators here, and this runs for each record.
    return tuple([name for name, _ in headers]), tuple([raw for _, raw in headers])


def with_all_headers(kafka: KafkaSettings, found: list[Record]) -> list[Record]:
    """Return the records in the same order, with headers that librdkafka could not return.

    librdkafka returns no headers if there are more than 100,000, and for some encodings that Java reads.
    Records without any headers are read again by kafka-python, which blocks up to 10 s for each partition. Such
    records are rare, because our own records always have headers.

    Args:
        kafka: The settings of Kafka.
        found: Records that librdkafka has read, in the order of their offsets within each partition.

    Raises:
        BackboneUnreachable: The records cannot be read again.
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
    """Read the records of one partition from offset `first` to `last`, inclusive, with kafka-python.

    The call blocks until all are read, at most about 10 s. The result maps offsets to records. Offsets without
    a record are absent.

    Raises:
        BackboneUnreachable: Kafka is unreachable, the records did not arrive within 10 s, or the first one was
            deleted from the log.
    """
    repair_kafka_client()
    where = TopicPartition(kafka.topic, partition)
    found: dict[int, Record] = {}
    deadline = time.monotonic() + REACH_TIMEOUT_S
    with topic_reader(kafka, [partition]) as consumer:
        consumer.seek(where, first)
        while consumer.position(where) <= last:
            if time.monotonic() > deadline:
                raise BackboneUnreachable(f"offsets {first} to {last} of partition {partition} did not come")
            for batch in consumer.poll(timeout_ms=200).values():
                found |= {one.offset: to_record(one) for one in batch}
    if first not in found:
        raise BackboneUnreachable(f"offset {first} of partition {partition} was deleted from the log")
    return found


@cache
def repair_kafka_client() -> None:
    """Patch kafka-python 3.0.12 in this process. Calls after the first one do nothing.

    One patch reads header names that are not UTF-8. The other closes the sockets of failed connections. A test
    fails without each patch. Check them again with another version of the library.
    """
    _read_any_header_name()
    _close_refused_sockets()


class _Piece(bytearray):
    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, "replace")


class _TolerantBuffer(bytearray):
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return found if isinstance(found, int) else _Piece(found)


def _read_any_header_name() -> None:
    """Decode header names that are not UTF-8 as Java does, with U+FFFD in them.

    Otherwise `poll` raises for such a record again and again, and no later record is read.
    """
    read = DefaultRecordBatch._read_msg

    def read_tolerantly(batch: Any) -> Any:
        try:
            return read(batch)
        except UnicodeDecodeError:  # raised before the batch moves on
            batch._buffer = _TolerantBuffer(batch._buffer)
            return read(batch)

    DefaultRecordBatch._read_msg = read_tolerantly


def _close_refused_sockets() -> None:
    """Close the socket of a failed connection; the library leaks one for each attempt, four a second."""
    connect = KafkaNetSocket.sock_connect

    async def connect_or_close(factory: Any, net: Any, sock: Any, *rest: Any, **options: Any) -> Any:
        try:
            return await connect(factory, net, sock, *rest, **options)
        except BaseException:
            sock.close()
            raise

    KafkaNetSocket.sock_connect = connect_or_close
