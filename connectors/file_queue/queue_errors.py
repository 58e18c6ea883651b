"""What the file queue raises (FQ-12), and how an error of the operating system is told."""

from __future__ import annotations

import errno

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}


class QueueError(Exception):
    """Something went wrong that the caller may want to know about. The message says what to do."""


class TopicError(QueueError, ValueError):
    """A topic that is none of the closed list."""


class QueueDisabledError(QueueError, RuntimeError):
    """The kill switch is on."""


def told(error: OSError, doing: str, root: str) -> QueueError:
    """The error to raise for what the operating system said, with the way out where there is one."""
    if error.errno in _NO_ROOM:
        return QueueError(
            f"no room left for {doing} (queue {root}): nothing was changed. Free some space or take away what "
            "has expired (trunkline queue expire), then do it again."
        )
    why = error.strerror or str(error)
    if error.errno in _NOT_ALLOWED:
        return QueueError(
            f"{doing} is not allowed here: {why} (queue {root}). The queue belongs to one user: choose a "
            "folder of your own with --root or TRUNKLINE_QUEUE_ROOT, or mend its permissions."
        )
    where = f" at {error.filename}" if isinstance(error.filename, str) else ""
    return QueueError(f"{doing} failed: {why}{where} (queue {root}).")
