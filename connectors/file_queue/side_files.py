"""The bodies of messages that are in side-files, files of one long body each (FQ-03)."""

from __future__ import annotations

from connectors.file_queue.message_record import side_file_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from connectors.file_queue.session_files import SessionFolder


def with_body(folder: SessionFolder, message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with its whole body, which is read from its side-file if it has one (FQ-03).

    If the side-file cannot be read, `body` stays the reference `@file:...`, and `_body_error` has the reason.
    """
    side_file = side_file_of(message)
    if side_file is None:
        return message
    body, why = folder.read_body(side_file)
    if body is None:
        return {**message, "_body_error": why}
    return {**message, "body": body, "_body_source": "side-file"}
