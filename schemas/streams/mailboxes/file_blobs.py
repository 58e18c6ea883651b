"""The long bodies of the file queue in a mailbox: a blob with the text, and a note in place of it (DL-27)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
