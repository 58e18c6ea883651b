"""The translation of an MQTT message: the Kafka record, the topic of its receipt, and the receipt."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from connectors.mqtt_link.receipt import AgentReceipt, LogPosition, Receipt, encode_receipt, read_payload
from connectors.mqtt_link.topics import inbox_topic, job_id_of, outbox_name, receipts_topic
from schemas.settings.settings import MqttSettings
from schemas.streams.agents.mqtt_agents import AGENT_SAID
from schemas.streams.job.job_event import JOB_EVENT
from schemas.wire.ids import AGENT, JOB, is_name, stream_key
from schemas.wire.record import OutgoingRecord, content_id, refused_stream

DOOR: Final = "mqtt"
# Mosquitto does not tell a subscriber who published. An event is trusted for its signature alone.
PRINCIPAL: Final = "unverified"

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class _Numbered(msgspec.Struct):
    seq: int | None = None


class _Identified(msgspec.Struct):
    message_id: str | None = None


class Incoming(NamedTuple):
    """A message as the bridge passes it on.

    `receipts_to` is the topic of its receipt, None when its own topic names no job or agent. `agent` is the
    agent whose outbox the message came from, None for any other topic.
    """

    record: OutgoingRecord
    receipts_to: str | None
    agent: str | None = None


_numbered = msgspec.json.Decoder(_Numbered)
_identified = msgspec.json.Decoder(_Identified)


def incoming(mqtt: MqttSettings, topic: str, payload: bytes, traceparent: str | None) -> Incoming:
    """Translate a message: an agent's message on an outbox, or a job's event on any other topic."""
    name = outbox_name(mqtt.agents_prefix, topic)
    if name is not None:
        agent = name if is_name(name) else None
        record = _record(AGENT, agent, AGENT_SAID, topic, payload, traceparent)
        return Incoming(record, None if agent is None else inbox_topic(mqtt.agents_prefix, agent), agent)
    job_id = job_id_of(mqtt.topic_prefix, topic)
    record = _record(JOB, job_id, JOB_EVENT, topic, payload, traceparent)
    return Incoming(record, None if job_id is None else receipts_topic(mqtt.topic_prefix, job_id))


def job_event_record(prefix: str, topic: str, payload: bytes, traceparent: str | None) -> OutgoingRecord:
    """Return the record of one message of a job, with its payload unchanged.

    Its id is the hash of topic and payload, so a redelivered message has the same id. A message on a topic
    without a valid job id goes to the stream `refused/mqtt`.
    """
    return _record(JOB, job_id_of(prefix, topic), JOB_EVENT, topic, payload, traceparent)


def well_formed_traceparent(properties: object) -> str | None:
    """Return the W3C `traceparent` of a message's MQTT 5 user properties, None when there is no valid one."""
    pairs = getattr(properties, "UserProperty", None) or ()
    found = [value for name, value in pairs if name == "traceparent"]
    if len(found) != 1 or _TRACEPARENT.fullmatch(found[0]) is None:
        return None
    return str(found[0])


def receipt_of(
    record: OutgoingRecord, position: LogPosition, verdict: str | None = None, reason: str | None = None
) -> bytes:
    """Return the receipt of a record that Kafka has.

    `verdict` is None when the gateway did not settle the record within the timeout.
    """
    seq = (read_payload(_numbered, record.value) or _Numbered()).seq
    if record.type != AGENT_SAID:
        return encode_receipt(Receipt(record.ce_id, seq, verdict, reason, position))
    message_id = (read_payload(_identified, record.value) or _Identified()).message_id
    if message_id is not None and not is_name(message_id):
        message_id = None
    return encode_receipt(AgentReceipt(record.ce_id, message_id, seq, verdict, reason, position))


def _record(
    kind: str, name: str | None, record_type: str, topic: str, payload: bytes, traceparent: str | None
) -> OutgoingRecord:
    return OutgoingRecord(
        stream=refused_stream(DOOR) if name is None else stream_key(kind, name),
        ce_id=content_id(topic.encode("utf-8"), payload),
        door=DOOR,
        principal=PRINCIPAL,
        type=record_type,
        value=payload,
        traceparent=traceparent,
    )
