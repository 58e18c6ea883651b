"""Ids, names and stream keys (CM-01), safe in MQTT topics, file names and Kafka keys."""

from __future__ import annotations

import re
import secrets
from functools import lru_cache
from typing import Final

NAME_LIMIT: Final = 128

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch
_JOB_ID = re.compile(r"[0-9a-f]{8}").fullmatch

# The kinds of streams. `schemas.streams.kinds` describes each.
JOB: Final = "job"
SESSION: Final = "session"
MAILBOX: Final = "mailbox"  # its name is `<realm>/<agent>`
TASK: Final = "task"
AGENT: Final = "agent"
CONTAINER: Final = "container"
PRINCIPAL: Final = "principal"
REFUSED: Final = "refused"
CONTROL: Final = "control"
THREAD: Final = "thread"


def is_name(text: str) -> bool:
    """Return whether `text` is a name by CM-01.

    It has 1 to 128 ASCII letters, digits, dots, underscores and hyphens, and begins with a letter or a digit.
    """
    return _NAME(text) is not None


def is_job_id(text: object) -> bool:
    """Return whether `text` is a job id: 8 lower-case hex digits."""
    return isinstance(text, str) and _JOB_ID(text) is not None


def new_job_id() -> str:
    """Return a new random job id of 32 bits.

    Two jobs may get the same id. The fold rejects the second registration as `seq_conflict`.
    """
    return secrets.token_hex(4)


def stream_key(kind: str, name: str) -> str:
    """Return the Kafka key of a stream, `kind/name`. Raises ValueError for a name that CM-01 forbids."""
    if not _is_stream_name(kind, name):
        raise ValueError(f"not a name for a stream of kind {kind}: {name!r}")
    return f"{kind}/{name}"


def parse_stream_key(key: bytes | None) -> tuple[str, str] | None:
    """Return `(kind, name)` of a Kafka key, or None if it is not the key of a stream. Never raises."""
    # The cache of `_parse` keeps its arguments, so no long key may reach it.
    if key is None or len(key) > 3 * NAME_LIMIT + 2:
        return None
    return _parse(key)


@lru_cache(maxsize=65_536)
def _parse(key: bytes) -> tuple[str, str] | None:
    try:
        kind, slash, name = key.decode("ascii").partition("/")
    except UnicodeDecodeError:
        return None
    if not slash or not _NAME(kind) or not _is_stream_name(kind, name):
        return None
    return kind, name


def _is_stream_name(kind: str, name: str) -> bool:
    if kind == JOB:
        return _JOB_ID(name) is not None
    if kind == MAILBOX:
        realm, slash, agent = name.partition("/")
        return bool(slash) and is_name(realm) and is_name(agent)
    return is_name(name)
