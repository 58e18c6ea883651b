"""The one form of a text at all doors.

A message is a text if its media type is `text/plain`, or if its JSON is a string or an object with the one
field `text`. Doors of text (MCP, MQTT, files, XML) show that text. Doors of JSON (HTTP, webhooks)
show `{"text": TEXT}` for a body that is no JSON by its media type: the text `42` is no number. So a text that a
reader sends on as it got it is the same text at every door.

A long body of the file queue is in a blob, and the message has a note in place of it (DL-27).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import orjson

from schemas.wire.record import JSON_CONTENT

TEXT_CONTENT: Final = "text/plain"
TEXT_FIELD: Final = "text"
# The beginnings of the canonical JSON of a text: other bodies are not parsed.
_TEXT_STARTS: Final = ('"', f'{{"{TEXT_FIELD}":"')


def shown_text(body: str, content_type: str) -> tuple[str, str]:
    """Return body and media type as doors that carry text show them: of a text, the text itself."""
    if content_type == JSON_CONTENT and body.startswith(_TEXT_STARTS):
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            return body, content_type
        if isinstance(found, dict) and len(found) == 1:
            found = found.get(TEXT_FIELD)
        if isinstance(found, str):
            return found, TEXT_CONTENT
    return body, content_type


def shown_json(body: str, content_type: str) -> Any:
    """Return a body as doors that carry JSON show it: its JSON, or the `text` of an object if it is none."""
    if content_type == JSON_CONTENT:
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(body)
    return {TEXT_FIELD: body}


FILE_BLOB_TYPE: Final = "text/plain; charset=utf-8"
"""The media type of a blob that the file bridge refers to: the queue's bodies are text."""


def note_of_blob(size: int) -> str:
    """Return the body of a message whose text is in a blob of `size` bytes."""
    return f"The text of this message has {size} bytes and is in its blob."


def is_long_body(body: str, blob: Mapping[str, Any]) -> bool:
    """Return whether a message has the form in which the file bridge posts a long body.

    `blob` is its reference, with the fields of `BlobReference`.
    """
    return blob["content_type"] == FILE_BLOB_TYPE and body == note_of_blob(blob["bytes"])
