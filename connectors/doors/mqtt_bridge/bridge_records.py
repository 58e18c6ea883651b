"""The translation of an MQTT message into a Kafka record, and of the record's verdict into a receipt."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from connectors.plumbing.mqtt_link.payloads import MQTT_DOOR, encode_receipt, read_payload
from schemas.settings.settings import MqttSettings
from schemas.streams.agents.mqtt_agents import AGENT_CONFIRMED, AGENT_SAID
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.wire.record import OutgoingRecord, refused_stream
from trunkline_agent.wire.ids import AGENT, JOB, content_id, is_name, stream_key
from trunkline_agent.wire.receipt import AgentReceipt, LogPosition, Receipt
from trunkline_agent.wire.topics import inbox_topic, job_id_of, outbox_name, receipts_topic

# Mosquitto does not tell a subscriber who published. An event is trusted for its signature alone.
PRINCIPAL: Final = "unverified"
_CONFIRMS: Final = b'"confirms"'


class _Numbered(msgspec.Struct):
    seq: int | None = None


class _Identified(msgspec.Struct):
    message_id: str | None = None


class _Confirming(msgspec.Struct):
    confirms: list[str]
    to: object = None


class Incoming(NamedTuple):
    """An MQTT message, translated into the record that the bridge appends to the log.

    Attributes:
        record: the record.
        receipts_to: the MQTT topic for its receipt; None when the message's topic has no valid job id or agent.
        agent: the agent whose outbox the message came from; None for a message on any other topic.
        confirms: the ids of the messages that the agent confirms, which may be none; None for other messages.
    """

    record: OutgoingRecord
    receipts_to: str | None
    agent: str | None = None
    confirms: tuple[str, ...] | None = None


_numbered = msgspec.json.Decoder(_Numbered)
_identified = msgspec.json.Decoder(_Identified)
_confirming = msgspec.json.Decoder(_Confirming)


def incoming(mqtt: MqttSettings, topic: str, payload: bytes, traceparent: str | None) -> Incoming:
    """Translate an MQTT message into the record to append, and find the topic for its receipt.

    A message on an agent's outbox topic becomes a message or a confirmation of that agent. A message on any
    other topic becomes a job event. Without a valid job id or agent name in the topic, the record goes to the
    stream `refused/mqtt`.

    Args:
        mqtt: the topic prefixes of jobs and agents.
        topic: the topic that the message was published on.
        payload: the message's bytes, which the record has unchanged.
        traceparent: the W3C trace context of the message; None: it has none.
    """
    name = outbox_name(mqtt.agents_prefix, topic)
    if name is not None:
        agent = name if is_name(name) else None
        confirms = None if agent is None else _confirmed(payload)
        record_type = AGENT_SAID if confirms is None else AGENT_CONFIRMED
        record = _record(AGENT, agent, record_type, topic, payload, traceparent)
        receipts_to = None if agent is None else inbox_topic(mqtt.agents_prefix, agent)
        return Incoming(record, receipts_to, agent, confirms)
    job_id = job_id_of(mqtt.topic_prefix, topic)
    record = _record(JOB, job_id, JOB_EVENT, topic, payload, traceparent)
    return Incoming(record, None if job_id is None else receipts_topic(mqtt.topic_prefix, job_id))


def job_event_record(prefix: str, topic: str, payload: bytes, traceparent: str | None) -> OutgoingRecord:
    """Return the record to append for an MQTT message that reports a job's event. The payload is unchanged.

    The record's id is the hash of topic and payload, so a redelivered message has the same id. A topic without
    a valid job id gives a record of the stream `refused/mqtt`; nothing is raised. `prefix` is the topic prefix
    of jobs (`mqtt.topic_prefix`). `traceparent` is the W3C trace context, None if the message has none.
    """
    return _record(JOB, job_id_of(prefix, topic), JOB_EVENT, topic, payload, traceparent)


def unreadable(topic: bytes, payload: bytes) -> Incoming:
    """Return the record to append for a message that is malformed, or whose topic is not UTF-8.

    The record is one of the stream `refused/mqtt`, with the payload unchanged. The message gets no receipt.
    """
    record = OutgoingRecord(
        refused_stream(MQTT_DOOR), content_id(topic, payload), MQTT_DOOR, PRINCIPAL, JOB_EVENT, payload
    )
    return Incoming(record, None)


def receipt_of(
    record: OutgoingRecord,
    position: LogPosition | None,
    verdict: str | None = None,
    reason: str | None = None,
    retry_after_s: int | None = None,
) -> bytes:
    """Return the MQTT payload of the receipt for a record. Never raises.

    Args:
        record: a job event, or a message that an agent published.
        position: where Kafka has stored the record; None if the bridge did not append it.
        verdict: the gateway's verdict; None when the gateway did not settle the record within the timeout.
        reason: why the record was rejected; None for other verdicts.
        retry_after_s: after how many seconds an agent may send a message again that a limit refused.
    """
    seq = (read_payload(_numbered, record.value) or _Numbered()).seq
    if record.type not in (AGENT_SAID, AGENT_CONFIRMED):
        return encode_receipt(Receipt(record.ce_id, seq, verdict, reason, position))
    message_id = (read_payload(_identified, record.value) or _Identified()).message_id
    if message_id is not None and not is_name(message_id):
        message_id = None
    return encode_receipt(
        AgentReceipt(record.ce_id, message_id, seq, verdict, reason, position, retry_after_s=retry_after_s)
    )


def _confirmed(payload: bytes) -> tuple[str, ...] | None:
    """Return the ids of the messages that an outbox payload confirms; None for another payload."""
    if _CONFIRMS not in payload:
        return None
    found = read_payload(_confirming, payload)
    return None if found is None or found.to is not None else tuple(found.confirms)


def _record(
    kind: str, name: str | None, record_type: str, topic: str, payload: bytes, traceparent: str | None
) -> OutgoingRecord:
    return OutgoingRecord(
        stream=refused_stream(MQTT_DOOR) if name is None else stream_key(kind, name),
        ce_id=content_id(topic.encode("utf-8"), payload),
        door=MQTT_DOOR,
        principal=PRINCIPAL,
        type=record_type,
        value=payload,
        traceparent=traceparent,
    )
