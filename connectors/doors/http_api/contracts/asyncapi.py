"""The AsyncAPI 3.1 document of the MQTT topics and of the records in the Kafka topic.

The document describes Trunkline as the application: it receives what clients publish, and sends what they get.
A record is a CloudEvent in the Kafka binary binding (`schemas.wire.record`), whose headers are UTF-8 texts.
"""

from __future__ import annotations

from typing import Any, Final

from connectors.doors.http_api.contracts.json_schemas import (
    EXAMPLES,
    MQTT_CONFIRMATION,
    MQTT_INBOX_MESSAGE,
    MQTT_JOB_EVENT,
    MQTT_JOB_RECEIPT,
    MQTT_MESSAGE_RECEIPT,
    MQTT_OUTBOX_MESSAGE,
    MQTT_PAYLOADS,
    Schema,
    kind_of,
    payload_schema,
    record_schema,
)
from schemas.log_access.event_topic import topic_config
from schemas.settings.sections import MqttSettings
from schemas.settings.settings import KafkaSettings, Settings
from schemas.streams.fold import RECORD_TYPES
from schemas.wire.record import JSON_CONTENT
from schemas.wire.wire_body import NAME_PATTERN
from trunkline_agent.wire.ids import JOB, MAILBOX
from trunkline_agent.wire.topics import events_filter, outboxes_filter

HEADERS: Final = "CloudEventsHeaders"
_BINDING_VERSION: Final = "0.5.0"
_NAME: Final = NAME_PATTERN.strip("^$")
_HEX_HASH: Final = "^[0-9a-f]{64}$"


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


_FIELDS: Final[dict[str, Schema]] = {
    "ce_specversion": _text("Version of CloudEvents.", const="1.0"),
    "ce_id": _text("Id of the record. A repeated request has the same id.", minLength=1, maxLength=512),
    "ce_source": _text("Door that appended the record, and principal.", pattern=f"^{_NAME}/{_NAME}$"),
    "ce_type": _text("Record type."),
    "ce_time": _text("Time by the door's clock, for information only.", format="date-time"),
    "ce_subject": _text("Key of the stream, the same as the key of the record."),
    "content-type": _text("Media type of the body."),
    "ce_mackey": _text("Name of the key of the MAC.", maxLength=256),
    "ce_mac": _text("MAC of the record, by the process that appended it.", maxLength=256),
    "ce_bodysize": _text("Size in bytes of a body that was too large.", pattern="^[0-9]{1,18}$"),
    "ce_bodysha256": _text("SHA-256 of a body that was too large.", pattern=_HEX_HASH),
    "traceparent": _text("W3C Trace Context of the request."),
}
_REQUIRED: Final = ("ce_specversion", "ce_id", "ce_source", "ce_type", "ce_subject")


def header_schema() -> Schema:
    """Return the schema of the headers that all records share."""
    return {
        "title": HEADERS,
        "description": (
            "The headers of a record. A body over the limit is cut to its first 1 KiB and has `ce_bodysize` "
            "and `ce_bodysha256`. The fold rejects it."
        ),
        "type": "object",
        "properties": {name: dict(field) for name, field in _FIELDS.items()},
        "required": list(_REQUIRED),
    }


def _key_pattern(kind: str) -> str:
    """Return the pattern of the keys of a kind of stream, such as `^session/...$`."""
    if kind == JOB:
        return f"^{JOB}/[0-9a-f]{{8}}$"
    if kind == MAILBOX:
        return f"^{MAILBOX}/{_NAME}/{_NAME}$"
    return f"^{kind}/{_NAME}$"


def log_message(record_type: str, payload: Schema) -> dict[str, Any]:
    """Return the AsyncAPI message of a record type.

    Args:
        record_type: the record type, the name of its schema in the document.
        payload: the JSON Schema of the body.
    """
    key = {"type": "string", "pattern": _key_pattern(kind_of(record_type).name)}
    own = {"type": "object", "properties": {"ce_type": {"const": record_type}, "ce_subject": key}}
    return {
        "name": record_type,
        "title": payload["title"],
        "summary": payload["description"].partition("\n")[0],
        "contentType": JSON_CONTENT,
        "headers": {"type": "object", "allOf": [{"$ref": f"#/components/schemas/{HEADERS}"}, own]},
        "payload": {"$ref": f"#/components/schemas/{record_type}"},
        "bindings": {
            "kafka": {
                "key": {**key, "description": "Key of the stream."},
                "bindingVersion": _BINDING_VERSION,
            }
        },
    }


ASYNCAPI_VERSION: Final = "3.1.0"
CONTRACT_VERSION: Final = "1"
_SCHEMAS: Final = "#/components/schemas/"
_DEFINITIONS: Final = "#/$defs/"
_RECEIPT_ID: Final = "$message.payload#/ce_id"
_JOB_EVENTS, _JOB_RECEIPTS, _OUTBOX, _INBOX, _LOG = "jobEvents", "jobReceipts", "outbox", "inbox", "log"
_MQTT_SERVERS: Final = ("mqtt", "mqttTls")
_KAFKA_SERVERS: Final = ("kafka", "kafkaTls")
_NUMBERS: Final = ("retention.ms", "retention.bytes", "max.message.bytes")
_AT_LEAST_ONCE: Final = {"mqtt": {"qos": 1, "retain": False, "bindingVersion": "0.2.0"}}
_ABOUT: Final = (
    "The MQTT topics of jobs and agents, and the records of the log. Trunkline receives what clients publish, "
    "and sends what they get. Every object is strict JSON: a key occurs once, integers have 64 bits, and NaN "
    "is invalid. Rules between fields, signatures and the order of events are not part of the schemas. The log "
    "also has the records that the fold rejects, whose bodies may have any form."
)


def asyncapi_document(settings: Settings) -> dict[str, Any]:
    """Return the AsyncAPI document.

    Args:
        settings: the names of topics and the form of the Kafka topic. Addresses and logins of servers are not
            taken from them: these are variables with the defaults of the settings.
    """
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {"title": "Trunkline", "version": CONTRACT_VERSION, "description": _ABOUT},
        "defaultContentType": JSON_CONTENT,
        "servers": _servers(),
        "channels": {**_mqtt_channels(settings.mqtt), _LOG: _log_channel(settings.kafka)},
        "operations": _operations(),
        "components": _components(),
    }


def _servers() -> dict[str, Any]:
    host, port = (str(MqttSettings.model_fields[name].default) for name in ("host", "port"))
    kafka_host, _, kafka_port = str(KafkaSettings.model_fields["bootstrap_servers"].default).partition(":")
    session = {"mqtt": {"cleanSession": True, "bindingVersion": "0.2.0"}}
    mqtt = {
        "protocolVersion": "5",
        "description": "The MQTT broker, or the broker of a job of its own. MQTT 3.1.1 is possible, too.",
        **_address("the MQTT broker", host, port),
        "security": _security("mqttPassword"),
        "bindings": session,
    }
    kafka = {
        "description": "A broker of the Kafka that stores the log. Only Trunkline's own programs append.",
        **_address("a Kafka broker", kafka_host, kafka_port),
        "security": _security("kafkaScramSha512", "kafkaScramSha256", "kafkaPlain", "kafkaOAuth"),
        "bindings": {"kafka": {"bindingVersion": _BINDING_VERSION}},
    }
    with_certificate = {"mqtt": "mqttCertificate", "kafka": "kafkaCertificate"}
    return {
        "mqtt": {"protocol": "mqtt", **mqtt},
        "mqttTls": {
            **mqtt,
            "protocol": "secure-mqtt",
            "security": [*mqtt["security"], *_security(with_certificate["mqtt"])],
        },
        "kafka": {"protocol": "kafka", **kafka},
        "kafkaTls": {
            **kafka,
            "protocol": "kafka-secure",
            "security": [*kafka["security"], *_security(with_certificate["kafka"])],
        },
    }


def _address(of: str, host: str, port: str) -> dict[str, Any]:
    variables = {
        "host": {"default": host, "description": f"Host of {of}."},
        "port": {"default": port, "description": f"TCP port of {of}."},
    }
    return {"host": "{host}:{port}", "variables": variables}


def _security(*schemes: str) -> list[dict[str, str]]:
    return [{"$ref": f"#/components/securitySchemes/{name}"} for name in schemes]


def _mqtt_channels(mqtt: MqttSettings) -> dict[str, Any]:
    events = events_filter(mqtt.topic_prefix).replace("+", "{job_id}")
    outbox = outboxes_filter(mqtt.agents_prefix).replace("+", "{name}")
    job = {"job_id": {"description": "Id of the job, 8 lower-case hex digits.", "examples": ["0a1b2c3d"]}}
    agent = {"name": {"description": "Name of the agent.", "examples": ["planner"]}}
    return {
        _JOB_EVENTS: _channel(
            events,
            "The events of a job. Its agent publishes them with QoS 1; `completed` and `error` are retained.",
            {"job_id": {**job["job_id"], "location": "$message.payload#/job_id"}},
            MQTT_JOB_EVENT,
        ),
        _JOB_RECEIPTS: _channel(
            f"{mqtt.topic_prefix}/{{job_id}}/receipts",
            "The receipts for a job's events. Subscribe before the first event is published.",
            job,
            MQTT_JOB_RECEIPT,
        ),
        _OUTBOX: _channel(
            outbox,
            "The messages that an agent sends, and its confirmations of received ones, which have `confirms`.",
            agent,
            MQTT_OUTBOX_MESSAGE,
            MQTT_CONFIRMATION,
        ),
        _INBOX: _channel(
            f"{mqtt.agents_prefix}/{{name}}/inbox",
            "The messages to an agent, and the receipts for those that it sent. Receipts have no field `from`.",
            agent,
            MQTT_INBOX_MESSAGE,
            MQTT_MESSAGE_RECEIPT,
        ),
    }


def _channel(address: str, description: str, parameters: dict[str, Any], *messages: str) -> dict[str, Any]:
    return {
        "address": address,
        "description": description,
        "servers": [{"$ref": f"#/servers/{name}"} for name in _MQTT_SERVERS],
        "parameters": parameters,
        "messages": _message_refs(messages),
    }


def _message_refs(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


def _log_channel(kafka: KafkaSettings) -> dict[str, Any]:
    config = topic_config(kafka)
    return {
        "address": kafka.topic,
        "description": (
            "The log: one record for each event, request and decision. The key is the stream, so that the "
            "records of a stream are in one partition, in order. Kafka's append time is the time of a record."
        ),
        "servers": [{"$ref": f"#/servers/{name}"} for name in _KAFKA_SERVERS],
        "messages": _message_refs(RECORD_TYPES),
        "bindings": {
            "kafka": {
                "topic": kafka.topic,
                "partitions": kafka.partitions,
                "replicas": kafka.replication_factor,
                "topicConfiguration": {
                    "cleanup.policy": [config["cleanup.policy"]],
                    **{
                        name: int(config[name])
                        for name in ("retention.ms", "retention.bytes", "max.message.bytes")
                    },
                },
                "bindingVersion": _BINDING_VERSION,
            }
        },
    }


def _operations() -> dict[str, Any]:
    return {
        "receiveJobEvent": {
            **_operation("receive", _JOB_EVENTS, "Take an event of a job into the log.", MQTT_JOB_EVENT),
            "reply": _reply(_JOB_RECEIPTS, MQTT_JOB_RECEIPT),
            "bindings": _AT_LEAST_ONCE,
        },
        "receiveAgentMessage": {
            **_operation("receive", _OUTBOX, "Take a message of an agent into the log.", MQTT_OUTBOX_MESSAGE),
            "reply": _reply(_INBOX, MQTT_MESSAGE_RECEIPT),
            "bindings": _AT_LEAST_ONCE,
        },
        "receiveConfirmation": {
            **_operation("receive", _OUTBOX, "Claim the messages that an agent has.", MQTT_CONFIRMATION),
            "reply": _reply(_INBOX, MQTT_MESSAGE_RECEIPT),
            "bindings": _AT_LEAST_ONCE,
        },
        "sendAgentMessage": {
            **_operation("send", _INBOX, "Deliver a message to an agent.", MQTT_INBOX_MESSAGE),
            "bindings": _AT_LEAST_ONCE,
        },
        "appendRecord": _operation("send", _LOG, "Append a record to the log.", *RECORD_TYPES),
        "foldRecord": _operation("receive", _LOG, "Read the log and decide the verdicts.", *RECORD_TYPES),
    }


def _operation(action: str, channel: str, summary: str, *messages: str) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "summary": summary,
        "messages": [{"$ref": f"#/channels/{channel}/messages/{name}"} for name in messages],
    }


def _reply(channel: str, message: str) -> dict[str, Any]:
    return {
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": [{"$ref": f"#/channels/{channel}/messages/{message}"}],
    }


def _components() -> dict[str, Any]:
    records = {name: record_schema(name) for name in RECORD_TYPES}
    payloads = {name: payload_schema(name) for name in MQTT_PAYLOADS}
    schemas = {HEADERS: header_schema()}
    for name, schema in {**records, **payloads}.items():
        for part, definition in {**schema.pop("$defs", {}), name: schema}.items():
            moved = _moved(definition)
            if schemas.setdefault(part, moved) != moved:
                raise ValueError(f"two schemas have the name {part}")
    return {
        "schemas": schemas,
        "messages": {
            **{name: log_message(name, schema) for name, schema in records.items()},
            **{name: _mqtt_message(name, schema) for name, schema in payloads.items()},
        },
        "securitySchemes": _SECURITY_SCHEMES,
    }


def _moved(part: Any) -> Any:
    """Return a part of a schema as a part of this document, which has all definitions in one place."""
    if isinstance(part, list):
        return [_moved(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {name: _moved(one) for name, one in part.items() if name not in ("$schema", "$id")}
    if isinstance(found.get("$ref"), str):
        found["$ref"] = found["$ref"].replace(_DEFINITIONS, _SCHEMAS)
    return found


def _mqtt_message(name: str, schema: Schema) -> dict[str, Any]:
    found = {
        "name": name,
        "title": schema["title"],
        "summary": schema["description"].partition("\n")[0],
        "contentType": JSON_CONTENT,
        "payload": {"$ref": f"{_SCHEMAS}{name}"},
        "examples": [{"payload": EXAMPLES[name]}],
    }
    if name in (MQTT_JOB_RECEIPT, MQTT_MESSAGE_RECEIPT):
        about = "The hash of topic and payload, which the sender computes, too."
        found["correlationId"] = {"location": _RECEIPT_ID, "description": about}
    return found


_SECURITY_SCHEMES: Final[dict[str, Any]] = {
    "mqttPassword": {
        "type": "userPassword",
        "description": (
            "The account of a job or an agent. The user is the job's id, or `agent.` and the agent's name. The "
            "password is derived from the secret with which the payloads are signed."
        ),
    },
    "mqttCertificate": {"type": "X509", "description": "A client certificate, if the broker asks for one."},
    "kafkaScramSha512": {"type": "scramSha512", "description": "The login of the stack's own Kafka."},
    "kafkaScramSha256": {"type": "scramSha256", "description": "`kafka.sasl_mechanism` SCRAM-SHA-256."},
    "kafkaPlain": {"type": "plain", "description": "`kafka.sasl_mechanism` PLAIN."},
    "kafkaOAuth": {
        "type": "oauth2",
        "description": "`kafka.sasl_mechanism` OAUTHBEARER: a token of the server at `kafka.oauth_token_url`.",
        "flows": {"clientCredentials": {"tokenUrl": "https://tokens.example/token", "availableScopes": {}}},
    },
    "kafkaCertificate": {"type": "X509", "description": "A client certificate (`kafka.ssl_certfile`)."},
}
