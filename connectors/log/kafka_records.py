"""Conversion of consumed Kafka messages, from both client libraries, into the records that the fold reads."""

from __future__ import annotations

from typing import Any, Final

from confluent_kafka import Message

from schemas.wire.record import NOT_UTF8, Record

# For a header name that is not UTF-8, this method sets an exception and returns a list with a hole, on which
# the interpreter crashes. `map` checks for the exception after each call; specialised bytecode does not. A
# second call on the same message would return the list without the exception, so each message is asked once.
_HEADERS: Final[Any] = Message.headers


def to_record(consumed: Any) -> Record:
    """Convert a record of kafka-python, whose time is in milliseconds."""
    one = consumed
    at = (one.topic, one.partition, one.offset, one.timestamp * 1000)
    return Record(*at, one.key, one.value, *_split(one.headers))


def message_record(message: Any) -> Record:
    """Convert a message of librdkafka, which ends a header's name at its first NUL, as `read_envelope` does."""
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
