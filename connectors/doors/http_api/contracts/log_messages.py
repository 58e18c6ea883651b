"""The records of the Kafka topic as messages of the AsyncAPI document: headers, key and body.

A record is a CloudEvent in the Kafka binary binding (`schemas.wire.record`). The headers are UTF-8 texts.
"""

from __future__ import annotations

from typing import Any, Final

from connectors.doors.http_api.contracts.json_schemas import Schema, kind_of
from schemas.wire.record import JSON_CONTENT
from schemas.wire.wire_body import NAME_PATTERN
from trunkline_agent.wire.ids import JOB, MAILBOX

HEADERS: Final = "CloudEventsHeaders"
BINDING_VERSION: Final = "0.5.0"
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


def key_pattern(kind: str) -> str:
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
    key = {"type": "string", "pattern": key_pattern(kind_of(record_type).name)}
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
                "bindingVersion": BINDING_VERSION,
            }
        },
    }
