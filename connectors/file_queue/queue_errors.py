"""The errors of the file queue (FQ-12), and messages for errors of the operating system."""

from __future__ import annotations

import errno

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}


class QueueError(Exception):
    """An operation has failed. The message says why and what to do."""


class TopicError(QueueError, ValueError):
    """A topic that does not exist."""


class QueueDisabledError(QueueError, RuntimeError):
    """The kill switch is on."""


class DiskErrors:
    """A context that raises QueueError for an OSError, with a remedy if there is one.

    `doing` names the operation for the message. A class, because importing contextlib would delay each send.
    """

    def __init__(self, doing: str, root: str) -> None:
        self._doing = doing
        self._root = root

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise _queue_error(error, self._doing, self._root) from error


def _queue_error(error: OSError, doing: str, root: str) -> QueueError:
    if error.errno in _NO_ROOM:
        return QueueError(
            f"no room left for {doing} (queue {root}): nothing was changed. Free some space or remove expired "
            "messages (trunkline queue expire), then try again."
        )
    why = error.strerror or str(error)
    if error.errno in _NOT_ALLOWED:
        return QueueError(
            f"{doing} is not allowed here: {why} (queue {root}). The queue belongs to one user: choose a "
            "folder of your own with --root or TRUNKLINE_QUEUE_ROOT, or correct its permissions."
        )
    where = f" at {error.filename}" if isinstance(error.filename, str) else ""
    return QueueError(f"{doing} failed: {why}{where} (queue {root}).")
