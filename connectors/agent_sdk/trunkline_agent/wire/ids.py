"""The forms of ids, names and stream keys (rule CM-01), safe in MQTT topics, file names and Kafka keys.

An id derived from content recognizes a repeated message, and matches a receipt with its message.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from functools import lru_cache
from typing import Final

NAME_LIMIT: Final = 128

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch
_HEX: Final = "0123456789abcdef"

# The kinds of streams. `schemas.streams.fold` describes each.
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
TOPIC: Final = "topic"
SCHEDULE: Final = "schedule"
BLOB: Final = "blob"  # its name is the SHA-256 of the content, in hex
WEBHOOK: Final = "webhook"


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name of an agent, door, principal or other thing (rule CM-01).

    A name has 1 to 128 ASCII letters, digits, dots, underscores and hyphens. It begins with a letter or digit.
    """
    return _NAME(text) is not None


def is_job_id(text: object) -> bool:
    """Return whether `text` is a job id: 8 lower-case hex digits."""
    return isinstance(text, str) and len(text) == 8 and not text.strip(_HEX)


def new_job_id() -> str:
    """Return a new random job id: 8 lower-case hex digits.

    With only 32 random bits, two jobs may get the same id. The fold then rejects the second registration as
    `seq_conflict`.
    """
    return secrets.token_hex(4)


def stream_key(kind: str, name: str) -> str:
    """Return the Kafka key of a stream, `kind/name`, such as `job/0a1b2c3d` or `mailbox/<realm>/<agent>`.

    Raises:
        ValueError: `name` is not valid for this kind. A job's name has 8 lower-case hex digits. A mailbox's
            name is two names joined by a slash. The name of any other stream satisfies `is_name`.
    """
    if not _is_stream_name(kind, name):
        raise ValueError(f"not a name for a stream of kind {kind}: {name!r}")
    return f"{kind}/{name}"


def parse_stream_key(key: bytes | None) -> tuple[str, str] | None:
    """Split the Kafka key `kind/name` into `(kind, name)`. Return None if it is not a valid stream key.

    Never raises. The kind may be unknown: only its form is checked. `None` is a record without a key.
    """
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
        return is_job_id(name)
    if kind == MAILBOX:
        realm, slash, agent = name.partition("/")
        return bool(slash) and is_name(realm) and is_name(agent)
    return is_name(name)


def content_id(*parts: bytes) -> str:
    """Return an id derived from content: the SHA-256 of all parts in hex. Equal parts give the same id.

    Each part is preceded by its length as eight bytes, so that the same bytes divided otherwise give another
    id.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
