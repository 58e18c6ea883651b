"""What the bridge makes of an MQTT message: the Kafka record, where its receipt goes, and the receipt."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from connectors.mqtt_link.agent_topics import agent_of, inbox_topic, is_outbox
from connectors.mqtt_link.job_topics import job_id_of, receipts_topic
from connectors.mqtt_link.receipt import AgentReceipt, LogPosition, Receipt, encode_receipt
from schemas.settings.settings import MqttSettings
from schemas.wire.ids import AGENT, JOB, is_name, stream_key
from schemas.wire.record import AGENT_SAID, JOB_EVENT, OutgoingRecord, content_id, refused_stream

DOOR: Final = "mqtt"
# Mosquitto does not tell a subscriber who published; an event is believed for its signature alone.
PRINCIPAL: Final = "unverified"

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class _Seq(msgspec.Struct):
    seq: int | None = None


class _MessageId(msgspec.Struct):
    message_id: str | None = None


class Incoming(NamedTuple):
    """A message as the bridge passes it on, and the topic of its receipt; None: nobody could be told."""

    record: OutgoingRecord
    receipts_to: str | None


_seq_decoder = msgspec.json.Decoder(_Seq)
_message_id_decoder = msgspec.json.Decoder(_MessageId)


def incoming(mqtt: MqttSettings, topic: str, payload: bytes, traceparent: str | None) -> Incoming:
    """What becomes of a message: an agent's word under an outbox, a job's event anywhere else."""
    if is_outbox(mqtt.agents_prefix, topic):
        agent = agent_of(mqtt.agents_prefix, topic)
        record = agent_said_record(mqtt.agents_prefix, topic, payload, traceparent)
        return Incoming(record, None if agent is None else inbox_topic(mqtt.agents_prefix, agent))
    job_id = job_id_of(mqtt.topic_prefix, topic)
    record = job_event_record(mqtt.topic_prefix, topic, payload, traceparent)
    return Incoming(record, None if job_id is None else receipts_topic(mqtt.topic_prefix, job_id))


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


def agent_said_record(prefix: str, topic: str, payload: bytes, traceparent: str | None) -> OutgoingRecord:
    """As `job_event_record`, of what an agent has published on its outbox."""
    agent = agent_of(prefix, topic)
    return OutgoingRecord(
        stream=refused_stream(DOOR) if agent is None else stream_key(AGENT, agent),
        ce_id=content_id(topic.encode("utf-8"), payload),
        door=DOOR,
        principal=PRINCIPAL,
        type=AGENT_SAID,
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


def receipt_of(
    record: OutgoingRecord, position: LogPosition, verdict: str | None = None, reason: str | None = None
) -> bytes:
    """The receipt of a record that Kafka has; verdict None when nobody has told in time how it was settled."""
    if record.type == AGENT_SAID:
        message_id, seq = _cheap_message_id(record.value), _cheap_seq(record.value)
        return encode_receipt(AgentReceipt(record.ce_id, message_id, seq, verdict, reason, position))
    return encode_receipt(Receipt(record.ce_id, _cheap_seq(record.value), verdict, reason, position))


def _cheap_message_id(payload: bytes) -> str | None:
    try:
        found = _message_id_decoder.decode(payload).message_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if found is not None and is_name(found) else None


def _cheap_seq(payload: bytes) -> int | None:
    try:
        return _seq_decoder.decode(payload).seq
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
