"""The settings of the file queue, read from environment variables, with their older names (FQ-09, FQ-11)."""

from __future__ import annotations

import os

from trunkline_agent.queue.queue_errors import QueueDisabledError, QueueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_BODY_THRESHOLD = 3_584
DEFAULT_SESSION = "default"
DEFAULT_SENDER = "anonymous"
# A byte of a body takes up to six bytes in its line, so a line with a body within this limit is never
# over-long.
MAX_BODY_THRESHOLD = 1024 * 1024
_OFF = {"", "0", "false", "no", "off"}


class QueueSettings:
    """The settings of the file queue in the environment variables `environ`, such as `os.environ`.

    TRUNKLINE_* takes precedence over the older ZOS_*. An empty variable counts as unset. Creating an object
    raises QueueError for an invalid value. The folder is a setting of its own: see `find_root`.
    """

    __slots__ = ("agent_id", "body_threshold", "fsync", "session")

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.session = _first(environ, "TRUNKLINE_QUEUE_SESSION", "ZOS_MQ_SESSION") or DEFAULT_SESSION
        self.agent_id = _first(environ, "TRUNKLINE_QUEUE_AGENT_ID", "ZOS_MQ_AGENT_ID")
        self.body_threshold = _threshold(environ)
        self.fsync = _fsync(environ)


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Return whether TRUNKLINE_QUEUE_DISABLED switches the queue off.

    Unset, empty, `0`, `false`, `no` and `off` mean that the queue is on. Any other value switches it off.
    """
    word = _first(environ, "TRUNKLINE_QUEUE_DISABLED", "ZOS_MQ_DISABLED") or ""
    return word.strip().lower() not in _OFF


def check_enabled(environ: Mapping[str, str]) -> None:
    """Raise QueueDisabledError if TRUNKLINE_QUEUE_DISABLED switches the queue off."""
    if is_disabled(environ):
        raise QueueDisabledError("the queue is switched off (TRUNKLINE_QUEUE_DISABLED)")


def find_root(environ: Mapping[str, str]) -> str:
    """Return the path of the queue's folder from the environment variables `environ`, such as `os.environ`.

    TRUNKLINE_QUEUE_ROOT names the folder. Without it and the older variables, it is `trunkline/queue` in the
    user's data folder. Raises QueueError if the user has none. The folder need not exist.
    """
    if own := _first(environ, "TRUNKLINE_QUEUE_ROOT"):
        return own
    if home := _first(environ, "TRUNKLINE_HOME"):
        return f"{home}/queue"
    if older := _first(environ, "ZOS_MQ_ROOT"):
        return older
    if older_home := _first(environ, "ZOS_HOME"):
        return f"{older_home}/agent-mq"
    data = environ.get("XDG_DATA_HOME", "")
    if not data.startswith("/"):  # by the XDG Base Directory Specification, a relative path is ignored
        home = environ.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - see message_queue
        data = f"{home}/.local/share"
    if not data.startswith("/"):
        raise QueueError("this user has no home folder: set TRUNKLINE_QUEUE_ROOT to the queue's folder")
    return f"{data}/trunkline/queue"


def checked_threshold(value: object, name: str) -> int:
    """Return `value` if it is a number of bytes from 0 to 1 MiB, the range of the setting `body_threshold`.

    Raises QueueError otherwise, with `name` as the name of the setting.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BODY_THRESHOLD:
        return value
    raise QueueError(f"{name} must be a number from 0 to {MAX_BODY_THRESHOLD}, not {str(value)[:40]!r}")


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((value for name in names if (value := environ.get(name))), None)


def _threshold(environ: Mapping[str, str]) -> int:
    for name in ("TRUNKLINE_QUEUE_BODY_THRESHOLD", "ZOS_MQ_BODY_THRESHOLD"):
        if text := environ.get(name):
            is_number = text.isascii() and text.isdigit() and len(text) < 10
            return checked_threshold(int(text) if is_number else text, name)
    return DEFAULT_BODY_THRESHOLD


def _fsync(environ: Mapping[str, str]) -> bool:
    text = environ.get("TRUNKLINE_QUEUE_FSYNC") or "1"
    if text not in ("0", "1"):
        raise QueueError(f"TRUNKLINE_QUEUE_FSYNC must be 1 (on the disk) or 0 (written), not {text[:40]!r}")
    return text == "1"
