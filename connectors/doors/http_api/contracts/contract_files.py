"""The files of the contracts: the AsyncAPI document, and a JSON Schema of each record type and MQTT payload."""

from __future__ import annotations

import json
from typing import Any, Final

from connectors.doors.http_api.contracts.asyncapi import asyncapi_document
from connectors.doors.http_api.contracts.json_schemas import record_schema
from connectors.doors.http_api.contracts.mqtt_payloads import MQTT_PAYLOADS, payload_schema
from schemas.settings.settings import Settings
from schemas.streams.kinds import RECORD_TYPES

ASYNCAPI_FILE: Final = "asyncapi.json"
OPENAPI_FILE: Final = "openapi.json"
SCHEMAS_FOLDER: Final = "schemas"


def contract_files(settings: Settings) -> dict[str, bytes]:
    """Return the contents of the files by their paths, such as `schemas/job.event.json`.

    The OpenAPI document is not among them, because the application makes it.

    Args:
        settings: the topics in the AsyncAPI document follow them.
    """
    schemas = {name: record_schema(name) for name in RECORD_TYPES}
    schemas |= {name: payload_schema(name) for name in MQTT_PAYLOADS}
    return {
        ASYNCAPI_FILE: file_of(asyncapi_document(settings)),
        **{f"{SCHEMAS_FOLDER}/{name}.json": file_of(schemas[name]) for name in sorted(schemas)},
    }


def file_of(document: dict[str, Any]) -> bytes:
    """Return a document as the content of a file: JSON with sorted keys. Equal documents give equal files."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
