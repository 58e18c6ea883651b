"""Kafka records as the fold reads them, out of both clients' consumers, whatever bytes they hold."""

from __future__ import annotations

from typing import Any, Final

from confluent_kafka import Message

from schemas.wire.record import NOT_UTF8, Record

# For a name that is not UTF-8 it sets an exception and returns a list with a hole in it, at which the program
# crashes. `map` looks for the exception after each call; bytecode that has become hot does not. Asked a second
# time, the message gives the list without the exception: so each is asked once.
_HEADERS: Final[Any] = Message.headers


def to_record(consumed: Any) -> Record:
    """The record that the fold reads. Kafka's time is in milliseconds."""
    headers = consumed.headers
    return Record(
        consumed.topic,
        consumed.partition,
        consumed.offset,
        consumed.timestamp * 1000,
        consumed.key,
        consumed.value,
        tuple([name for name, _ in headers]),
        tuple([raw for _, raw in headers]),
    )


def message_record(message: Any) -> Record:
    """The same out of librdkafka's consumer, which ends a header's name at its first NUL, as `read_envelope`
    does.
    """
    try:
        (headers,) = map(_HEADERS, (message,))
    except (SystemError, UnicodeDecodeError):
        # Nothing of them can be had; the fold rejects a record with such a name, whatever else it says.
        headers = ((NOT_UTF8, None),)
    headers = headers or ()
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1] * 1000,
        message.key(),
        message.value(),
        tuple([name for name, _ in headers]),
        tuple([raw for _, raw in headers]),
    )
