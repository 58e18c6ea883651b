"""What the bridge makes of an MQTT message: the Kafka record, and later the receipt."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from connectors.job_topics import job_id_of
from connectors.receipt import LogPosition, Receipt, encode_receipt
from schemas.ids import JOB, stream_key
from schemas.record import JOB_EVENT, OutgoingRecord, content_id, refused_stream

DOOR: Final = "mqtt"
# Mosquitto does not tell a subscriber who published; an event is believed for its signature alone.
PRINCIPAL: Final = "unverified"

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class _Seq(msgspec.Struct):
    seq: int | None = None


_seq_decoder = msgspec.json.Decoder(_Seq)


def job_event_record(prefix: str, topic: str, payload: bytes, traceparent: str | None) -> OutgoingRecord:
    """The record of one message, its bytes as they came.

    Its id is the hash of topic and payload, so a redelivery has the same id. Under a topic that names no
    job it goes to `refused/mqtt`.
    """
    job_id = job_id_of(prefix, topic)
    return OutgoingRecord(
        stream=refused_stream(DOOR) if job_id is None else stream_key(JOB, job_id),
        ce_id=content_id(topic.encode("utf-8"), payload),
        door=DOOR,
        principal=PRINCIPAL,
        type=JOB_EVENT,
        value=payload,
        traceparent=traceparent,
    )


def well_formed_traceparent(properties: object) -> str | None:
    """The W3C `traceparent` among a message's MQTT 5 user properties, None when there is no good one."""
    pairs = getattr(properties, "UserProperty", None) or ()
    found = [value for name, value in pairs if name == "traceparent"]
    if len(found) != 1 or _TRACEPARENT.fullmatch(found[0]) is None:
        return None
    return str(found[0])


def event_receipt(
    record: OutgoingRecord, position: LogPosition, verdict: str | None = None, reason: str | None = None
) -> bytes:
    """The receipt of a record that Kafka has; verdict None when nobody has told in time how it was settled."""
    return encode_receipt(Receipt(record.ce_id, _cheap_seq(record.value), verdict, reason, position))


def _cheap_seq(payload: bytes) -> int | None:
    try:
        return _seq_decoder.decode(payload).seq
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
