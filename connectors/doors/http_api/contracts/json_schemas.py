"""The JSON Schemas (2020-12) of the records in the log and of the MQTT payloads, with examples of the payloads.

The schemas use no keyword that draft 7 reads differently, because AsyncAPI documents contain draft 7. Their
patterns are valid in ECMA 262, which JSON Schema prescribes, and in Python. The schema of a record, made from
the model of its body, accepts each body that the fold's check of the form accepts. It accepts some more,
because rules between fields cannot be expressed.

The MQTT payloads are those of jobs (JE-01, JE-17) and of agents (JE-26). The payloads of publishers have a
schema stricter than that of their record in the log, which also has payloads that the fold rejects: the
signature is required.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, get_args

import msgspec
from pydantic.json_schema import GenerateJsonSchema

from connectors.operations.principals.principal_operations import MailboxMessageAnswer
from connectors.plumbing.mqtt_link.payloads import INBOX_FIELDS
from schemas.fold.stream_kind import StreamKind
from schemas.streams.agents.mqtt_agents import AGENT_CONFIRMED, AGENT_SAID
from schemas.streams.fold import KINDS
from schemas.streams.job.job_registry import JOB_EVENT
from trunkline_agent.wire.receipt import AgentReceipt, Receipt
from trunkline_agent.wire.signing import SIGNATURE_FIELD
from trunkline_agent.wire.verdicts import REASONS, Verdict

Schema = dict[str, Any]
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
VERSION: Final = "schema_version"
_URN: Final = "urn:trunkline:schema:"
_ATTRIBUTES: Final = "\n\nAttributes:\n"
# One attribute of a docstring: its name, and its text with the indented lines that continue it.
_ATTRIBUTE: Final = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)
_WORDS: Final = {"`None`": "`null`", "`True`": "`true`", "`False`": "`false`"}


class PortableSchema(GenerateJsonSchema):
    """Pydantic's generator, with portable patterns, texts from docstrings, and no titles of fields."""

    def str_schema(self, schema: Any) -> Schema:
        """Return the schema of a text. Its pattern ends with a dollar sign, as JSON Schema wants it."""
        found = super().str_schema(schema)
        if "pattern" in found:
            found["pattern"] = found["pattern"].replace(r"\z", "$")
        return found

    def model_schema(self, schema: Any) -> Schema:
        """Return the schema of a model. Fields get the texts that its docstring has for them."""
        found = super().model_schema(schema)
        text, _, attributes = found.get("description", "").partition(_ATTRIBUTES)
        found["description"] = paragraphs(text)
        fields, properties = schema["cls"].model_fields, found.get("properties", {})
        for name, about in _ATTRIBUTE.findall(attributes):
            alias = fields[name].alias or name
            properties[alias].setdefault("description", _sentence(about))
        return found

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a title repeats the name of the field."""
        return False


def record_schema(record_type: str) -> Schema:
    """Return the JSON Schema of the body of a record type, such as `job.event`.

    The version must be there, except in bodies that other programs make (`StreamKind.foreign_types`).

    Raises:
        KeyError: there is no such record type.
    """
    kind = kind_of(record_type)
    found = kind.models[record_type].model_json_schema(schema_generator=PortableSchema)
    if record_type not in kind.foreign_types:
        found["properties"][VERSION].pop("default", None)
        found["required"] = [VERSION, *(name for name in found.get("required", ()) if name != VERSION)]
    return document(record_type, found)


def kind_of(record_type: str) -> StreamKind:
    """Return the kind of stream that a record type belongs to. Raises KeyError for an unknown type."""
    for kind in KINDS.values():
        if record_type in kind.models:
            return kind
    raise KeyError(record_type)


def document(name: str, schema: Schema) -> Schema:
    """Return a schema as a document of its own, with its dialect and its id."""
    return {**schema, "$schema": DIALECT, "$id": f"{_URN}{name}"}


def paragraphs(text: str) -> str:
    """Return a docstring as paragraphs of one line each, in the words of JSON."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text.strip())
    return re.sub("|".join(_WORDS), lambda found: _WORDS[found[0]], text)


def _sentence(text: str) -> str:
    words = " ".join(paragraphs(text).split())
    return words[0].upper() + words[1:]


MQTT_JOB_EVENT: Final = "mqtt.job_event"
MQTT_JOB_RECEIPT: Final = "mqtt.job_receipt"
MQTT_OUTBOX_MESSAGE: Final = "mqtt.outbox_message"
MQTT_CONFIRMATION: Final = "mqtt.confirmation"
MQTT_INBOX_MESSAGE: Final = "mqtt.inbox_message"
MQTT_MESSAGE_RECEIPT: Final = "mqtt.message_receipt"

_HASH: Final = "^[0-9a-f]{64}$"
_SIGNATURE: Final[Schema] = {
    "type": "string",
    "pattern": _HASH,
    "description": "HMAC-SHA256 over the canonical JSON of the payload without this field, as 64 hex digits.",
}
_VERSION: Final[Schema] = {"const": 1, "type": "integer", "description": "Version of the form: 1."}
# A field with one of these keywords replaces the one of the class, which is a text or a number.
_COMPLETE: Final = frozenset({"const", "enum", "pattern"})
_RECEIPT_FIELDS: Final[dict[str, Schema]] = {
    "ce_id": {
        "type": "string",
        "pattern": _HASH,
        "description": "Id of the record: the hash of topic and payload. It alone identifies the receipt.",
    },
    "seq": {"description": "`seq` of the payload. Null: it could not be read."},
    "verdict": {
        "enum": [*get_args(Verdict), None],
        "description": "Verdict of the fold. Null: the record is in the log, and not settled in time.",
    },
    "reason": {"enum": [*REASONS, None], "description": "Why the record was rejected. Null: it was not."},
    "position": {"description": "Position of the record in the log. Null: it is not in the log."},
    "message_id": {"description": "`message_id` of the payload. Null: it could not be read."},
    "kind": {"const": "receipt", "type": "string", "description": "`receipt`."},
    VERSION: _VERSION,
    "retry_after_s": {
        "description": "Seconds after which the message may be sent again. Null: no limit refused it."
    },
}


def _job_event() -> Schema:
    found = record_schema(JOB_EVENT)
    signed = {SIGNATURE_FIELD: copy.deepcopy(_SIGNATURE)}
    found["properties"]["data"] |= {"properties": signed, "required": [SIGNATURE_FIELD]}
    about = "An event of a job, as its agent publishes it. `data.hmac_sig` signs the whole payload."
    return {**found, "title": "MqttJobEvent", "description": about}


def _outbox_message() -> Schema:
    found = record_schema(AGENT_SAID)
    found["properties"][SIGNATURE_FIELD] = copy.deepcopy(_SIGNATURE)
    found["required"] = [*found["required"], SIGNATURE_FIELD]
    about = "A message to one recipient, as an agent publishes it. `hmac_sig` signs the whole payload."
    return {**found, "title": "MqttOutboxMessage", "description": about}


def _confirmation() -> Schema:
    found = record_schema(AGENT_CONFIRMED)
    # Without any id the bridge takes it as a greeting, which is no record.
    del found["properties"]["confirms"]["minItems"]
    found["properties"][SIGNATURE_FIELD] = copy.deepcopy(_SIGNATURE)
    found["required"] = [*found["required"], SIGNATURE_FIELD]
    about = (
        "Ids of messages that an agent has received. Without any, it says that the agent is connected: what it "
        "did not confirm comes again at once. `hmac_sig` signs the whole payload."
    )
    return {**found, "title": "MqttConfirmation", "description": about}


def _inbox_message() -> Schema:
    known = MailboxMessageAnswer.model_json_schema(schema_generator=PortableSchema)["properties"]
    fields = {
        VERSION: _VERSION,
        "from": known["sender"],
        **{name: known[name] for name in INBOX_FIELDS},
        "body": {"type": "string", "description": "Body of the message."},
    }
    for one in fields.values():
        one.pop("default", None)
    return {
        "title": "MqttInboxMessage",
        "description": "A message to an agent, as the bridge publishes it. Receipts have no field `from`.",
        "type": "object",
        "properties": copy.deepcopy(fields),
        "required": list(fields),
    }


def _receipt(form: type[Receipt | AgentReceipt], title: str) -> Schema:
    whole = msgspec.json.schema(form)
    found = whole["$defs"].pop(form.__name__)
    for name, field in found["properties"].items():
        more = _RECEIPT_FIELDS[name]
        found["properties"][name] = dict(more) if _COMPLETE & more.keys() else {**field, **more}
        found["properties"][name].pop("default", None)
    # The bridge writes every field.
    required = list(found["properties"])
    about = found["description"].partition("\n")[0]
    return {**found, "title": title, "description": about, "required": required, "$defs": whole["$defs"]}


_FORMS: Final[Mapping[str, Callable[[], Schema]]] = {
    MQTT_JOB_EVENT: _job_event,
    MQTT_JOB_RECEIPT: partial(_receipt, Receipt, "MqttJobReceipt"),
    MQTT_OUTBOX_MESSAGE: _outbox_message,
    MQTT_CONFIRMATION: _confirmation,
    MQTT_INBOX_MESSAGE: _inbox_message,
    MQTT_MESSAGE_RECEIPT: partial(_receipt, AgentReceipt, "MqttMessageReceipt"),
}
MQTT_PAYLOADS: Final = tuple(_FORMS)
"""The names of the payloads' schemas."""

_EXAMPLE_HASH: Final = "ab" * 32
_EXAMPLE_TIME: Final = "2026-11-21T10:00:00Z"
EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    MQTT_JOB_EVENT: {
        VERSION: 1,
        "seq": 2,
        "job_id": "0a1b2c3d",
        "event": "progress",
        "timestamp": _EXAMPLE_TIME,
        "detail": "step 3 of 10",
        "data": {"step": 3, SIGNATURE_FIELD: _EXAMPLE_HASH},
    },
    MQTT_JOB_RECEIPT: {
        "ce_id": _EXAMPLE_HASH,
        "seq": 2,
        "verdict": "accepted",
        "reason": None,
        "position": {"partition": 2, "offset": 4711},
    },
    MQTT_OUTBOX_MESSAGE: {
        "message_id": "m-1",
        "to": "planner",
        "kind": "ask",
        "body": {"question": "what is next?"},
        "seq": 1,
        SIGNATURE_FIELD: _EXAMPLE_HASH,
    },
    MQTT_CONFIRMATION: {VERSION: 1, "confirms": ["m-2", "m-3"], SIGNATURE_FIELD: _EXAMPLE_HASH},
    MQTT_INBOX_MESSAGE: {
        VERSION: 1,
        "from": "planner",
        **dict.fromkeys(INBOX_FIELDS),
        "message_id": "m-2",
        "from_verified": True,
        "kind": "answer",
        "body": "take a break",
        "content_type": "text/plain",
        "priority": "normal",
        "in_reply_to": "m-1",
        "posted_at": _EXAMPLE_TIME,
    },
    MQTT_MESSAGE_RECEIPT: {
        VERSION: 1,
        "kind": "receipt",
        "ce_id": _EXAMPLE_HASH,
        "message_id": "m-1",
        "seq": 1,
        "verdict": "rejected",
        "reason": "rate_limited",
        "position": None,
        "retry_after_s": 12,
    },
}
"""An example of each payload. The signatures and hashes are made up."""


def payload_schema(name: str) -> Schema:
    """Return the JSON Schema of an MQTT payload, one of `MQTT_PAYLOADS`. Raises KeyError for another name."""
    return document(name, _FORMS[name]())
