"""The errors of the file queue (FQ-12), and messages for errors of the operating system."""

from __future__ import annotations

import errno

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}


class QueueError(Exception):
    """An operation of the file queue has failed. The message says why and what to do."""


class TopicError(QueueError, ValueError):
    """The given topic does not exist. The message names the existing ones."""


class QueueDisabledError(QueueError, RuntimeError):
    """The queue is switched off by the environment variable TRUNKLINE_QUEUE_DISABLED."""


class DiskErrors:
    """A context manager that turns an OSError in its block into a QueueError, and passes other errors on.

    The text of the QueueError says what to do about a full disk or missing permissions. It is a class, because
    importing contextlib would delay each send.

    Args:
        doing: The operation, as the subject of the error's text, such as "the message" in "the message failed".
        root: The queue's folder, for the error's text.
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
