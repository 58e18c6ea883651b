"""The files beside the lines: long bodies (FQ-03), and the bytes of blobs of other doors (DL-27)."""

from __future__ import annotations

import os

from trunkline_agent.queue.message_record import blob_file_of, side_file_of
from trunkline_agent.queue.session_files import BODIES, REWRITE, open_fd, remove, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from trunkline_agent.queue.session_files import SessionFolder


def with_body(folder: SessionFolder, message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with its whole body, which is read from its side-file if it has one (FQ-03).

    If the side-file cannot be read, `body` stays the reference `@file:...`, and `_body_error` has the reason.
    A message with a blob gets `_blob_path`, the path of the file with its bytes, or `_blob_error`.
    """
    if "blob" in message:
        message = {**message, **_blob_of(folder, message)}
    side_file = side_file_of(message)
    if side_file is None:
        return message
    body, why = folder.read_body(side_file)
    if body is None:
        return {**message, "_body_error": why}
    return {**message, "body": body, "_body_source": "side-file"}


def _blob_of(folder: SessionFolder, message: dict[str, Any]) -> dict[str, str]:
    name = blob_file_of(message)
    if name is None:
        return {"_blob_error": "the blob was removed before it came to the queue"}
    try:
        fd = folder.open_file(name, BODIES)
        if fd is None:
            return {"_blob_error": "the file of the blob is missing"}
        with fd:
            if os.fstat(fd).st_size != message["blob"]["bytes"]:
                return {"_blob_error": "the file of the blob has another length"}
    except OSError as error:
        return {"_blob_error": f"the file of the blob cannot be read: {error.strerror}"}
    return {"_blob_path": f"{folder.path}/{BODIES}/{name}"}


def write_content(folder: SessionFolder, name: str, parts: Iterable[bytes]) -> None:
    """Write a file in `bodies/` from its parts, and sync it to the disk: as a whole, or not at all.

    An older file of this name is replaced in one step. Until `unlock`, `Queue.expire` does not delete the file
    as unused. Raises OSError, and passes on the errors of `parts`.
    """
    folder.hold_bodies()
    new = f".{name}.new"
    with folder.open_folder(BODIES) as bodies:
        with open_fd(new, REWRITE, bodies) as fd:
            try:
                for part in parts:
                    write_all(fd, part)
                os.fsync(fd)
                os.replace(new, name, src_dir_fd=bodies, dst_dir_fd=bodies)
            except BaseException:
                remove(new, bodies)
                raise
        os.fsync(bodies)
