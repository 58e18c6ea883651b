"""The audit of the file queue: a line for each send, poll and expire, never a body (FQ-10)."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from connectors.file_queue.message_record import stamp, to_line
from connectors.file_queue.session_files import append, open_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AUDIT = "audit.jsonl"


def write_audit(root: str, op: str, **fields: Any) -> str | None:
    """Append a line to the audit. Return the reason if that has failed, else None.

    Never raises: the operation has succeeded, and an error would make it look as if it had not.
    """
    path = f"{root}/{AUDIT}"
    try:
        with open_fd(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return f"the audit {path} was not written: it is not a regular file"
            # Sessions have locks of their own but share this file, so the file itself is locked.
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                append(fd, to_line({"ts": stamp(), "op": op, **fields}))
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
    except Exception as error:  # noqa: BLE001 - see above
        why = os.strerror(error.errno or errno.EIO) if isinstance(error, OSError) else str(error)
        return f"the audit {path} was not written: {why}"
    return None
