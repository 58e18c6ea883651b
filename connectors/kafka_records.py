"""Kafka records as the fold reads them, out of kafka-python's consumers, whatever bytes they hold."""

from __future__ import annotations

from typing import Any

from schemas.record import Record


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
