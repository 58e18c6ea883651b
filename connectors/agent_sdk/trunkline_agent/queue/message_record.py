"""One message as one line of JSON: write a line, and check whether a line is a valid message (FQ-02).

Any program that can write to the file may have written a line. A line that is not a message is `None`, never an
error.
"""

from __future__ import annotations

import json
import math
import os
import re
import time

from trunkline_agent.queue.queue_errors import TopicError
from trunkline_agent.wire.message_fields import (
    DURATION_S_LEAST,
    DURATION_S_MOST,
    EXPIRES_FIRST,
    MESSAGE_FIELDS,
    expires_first,
    is_duration,
    unknown_field,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

TOPICS = frozenset({"ask", "answer", "broadcast", "spawn-request", "status"})
EVERYBODY = (None, "all", "broadcast")
# The longest line and the longest body that are read.
LINE_LIMIT = BODY_LIMIT = 16 * 1024 * 1024

# In the order in which a poll returns messages. A line without a priority has the priority `normal`.
PRIORITIES = ("high", "normal", "low")

# The end of the name of a file with the bytes of a blob.
BLOB_SUFFIX = ".blob"

_FIELDS = ("msg_id", "ts", "from", "to", "topic", "body", "in_reply_to", "ttl_s")
# A line has these only if they have a value.
FIELDS_IF_GIVEN = tuple(one for one in MESSAGE_FIELDS if one.name not in _FIELDS)

# CM-01, as in trunkline_agent.wire.ids; a test compares the two. Without a pattern, because compiling one takes
# a fifth of the time of a send.
NAME_LIMIT = 128
_NAME_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:\d\d)?"
# Characters that JSON does not escape but a terminal may execute: C1, DEL, line separators, direction marks.
_UNSAFE = "[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def is_name(value: object) -> bool:
    """Return whether `value` is a valid name, or an id, which follows the same rule (CM-01).

    A name has at most 128 ASCII letters, digits, `.`, `_` and `-`, and begins with a letter or digit.
    """
    return (
        isinstance(value, str)
        and 0 < len(value) <= NAME_LIMIT
        and value[0] not in "._-"
        and not value.strip(_NAME_CHARACTERS)
    )


def checked_name(value: object, what: str) -> str:
    """Return `value` if it is a valid name, else raise ValueError.

    For the rule see `is_name`. `what` says in the error's text which name it is, such as "the sender".
    """
    if is_name(value):
        return str(value)
    raise ValueError(
        f"{what} {str(value)[:40]!r} is not a name: at most 128 letters, digits, '.', '_' and '-', and "
        "a letter or digit first"
    )


def checked_fields(given: Mapping[str, object]) -> dict[str, object]:
    """Return those of `FIELDS_IF_GIVEN` that have a value.

    Raises TypeError for another field, and ValueError for an invalid value.
    """
    if error := unknown_field(given):
        raise error
    for one in FIELDS_IF_GIVEN:
        value, what = given.get(one.name), f"the {one.label.lower()}"
        if value is not None and not one.most:
            checked_name(value, what)
        elif why := one.fault(value, is_name):
            raise ValueError(f"{what}: {why}, not {str(value)[:40]!r}")
    return {name: value for name, value in given.items() if value is not None}


def checked_topic(value: object) -> str:
    """Return `value` if it is a topic of the queue, else raise TopicError.

    The topics are `ask`, `answer`, `broadcast`, `spawn-request` and `status`.
    """
    if isinstance(value, str) and value in TOPICS:
        return value
    raise TopicError(f"there is no topic {str(value)[:40]!r}; the topics are {', '.join(sorted(TOPICS))}")


def checked_topics(values: Iterable[object]) -> list[str]:
    """Return these topics sorted, each once; a string is one topic. Raises TopicError like `checked_topic`."""
    # A string is an iterable of its characters.
    return sorted({checked_topic(value) for value in ((values,) if isinstance(values, str) else values)})


def check_durations(deliver_after_s: object, ttl_s: object) -> None:
    """Raise ValueError for a time that is no duration and not None, and if the message would expire first."""
    for name, value in (("ttl_s", ttl_s), ("deliver_after_s", deliver_after_s)):
        if value is not None and not is_duration(value):
            limits = f"from {DURATION_S_LEAST} to {DURATION_S_MOST}"
            raise ValueError(f"{name} must be a number of seconds {limits}, not {str(value)[:40]!r}")
    if expires_first(deliver_after_s, ttl_s):  # type: ignore[arg-type]
        raise ValueError(f"{EXPIRES_FIRST}: ttl_s is not above deliver_after_s")


def checked_priority(value: object) -> str:
    """Return `value` if it is a priority, `high`, `normal` or `low`; else raise ValueError."""
    if isinstance(value, str) and value in PRIORITIES:
        return value
    raise ValueError(f"there is no priority {str(value)[:40]!r}; the priorities are {', '.join(PRIORITIES)}")


def rank(message: Mapping[str, Any]) -> int:
    """Return the place of a message's priority in `PRIORITIES`. A poll returns lower ones first.

    `message` has the fields of a line, as `parse_line` returns them.
    """
    return PRIORITIES.index(message.get("priority", "normal"))


def encoded_body(body: object) -> bytes:
    """Return a message's body in UTF-8. Raises ValueError if it is no text, or longer than 16 MiB."""
    if not isinstance(body, str):
        raise ValueError(f"the body must be text, not {type(body).__name__}")
    try:
        text = body.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("the body cannot be encoded as UTF-8") from error
    if len(text) > BODY_LIMIT:
        raise ValueError(f"the body has {len(text)} bytes; the limit is {BODY_LIMIT}")
    return text


# Marks a line that the bridge has written. It comes from a mailbox and is not sent back.
CARRIED = {"via": "trunkline"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_ADVICE = "are in UTF-16, which the queue cannot read: write the file in UTF-8"
CARRIED_MARK = b'"via":"trunkline"'


def new_id() -> str:
    """Return a new message id: 128 random bits in hex."""
    return os.urandom(16).hex()


def stamp() -> str:
    """Return the current time as ISO 8601 text in UTC with microseconds."""
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanoseconds // 1000:06d}Z"


def reference(msg_id: str) -> str:
    """Return the text `@file:<msg_id>.txt`, which a line has in place of a body that is in a side-file.

    A side-file has one body that is too long for a line.
    """
    return f"@file:{msg_id}.txt"


def side_file_of(message: Mapping[str, Any]) -> str | None:
    """Return the name of the side-file that has the message's body, or None if the line has the body itself.

    A side-file has one body that is too long for a line. `message` has the fields of a line, as `parse_line`
    returns them. Only a reference with the message's own id counts, so any other body that looks like a
    reference is an ordinary body.
    """
    msg_id = message["msg_id"]
    return f"{msg_id}.txt" if message["body"] == reference(msg_id) else None


def blob_in_line(msg_id: str, digest: str, size: int, content_type: str, *, is_gone: bool) -> dict[str, Any]:
    """Return the field `blob` of a line: a content of another door that is in a file of raw bytes.

    Args:
        msg_id: The id of the message.
        digest: The SHA-256 of the content in hex.
        size: Its length in bytes.
        content_type: Its media type.
        is_gone: Whether the content was removed before it came to the queue, so that there is no file.
    """
    named = {"bytes": size, "content_type": content_type, "sha256": digest}
    return {"file": None if is_gone else f"@file:{msg_id}{BLOB_SUFFIX}", **named}


def blob_file_of(message: Mapping[str, Any]) -> str | None:
    """Return the name of the file with the message's blob, or None if it has none.

    `message` has the fields of a line, as `parse_line` returns them. The name has the message's own id, so no
    line can name the file of another message.
    """
    blob = message.get("blob")
    return None if blob is None or blob["file"] is None else f"{message['msg_id']}{BLOB_SUFFIX}"


def _is_blob(blob: dict[str, Any], msg_id: str) -> bool:
    file, size, kind, digest = (blob.get(name) for name in ("file", "bytes", "content_type", "sha256"))
    return (
        len(blob) == 4
        and (file is None or file == f"@file:{msg_id}{BLOB_SUFFIX}")
        and type(size) is int
        and size >= 0
        and type(kind) is str
        and len(kind) <= NAME_LIMIT
        and type(digest) is str
        and len(digest) == 64
        and not digest.strip("0123456789abcdef")
    )


def to_line(record: Mapping[str, Any]) -> bytes:
    """Return `record` as one line of JSON in UTF-8, with a newline at its end.

    Characters that could control a terminal are escaped, so that the line may be shown with `cat`. Raises
    ValueError for a number that JSON does not have, such as NaN.
    """
    return _shown(json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def to_indented(record: Mapping[str, Any]) -> bytes:
    """Return `record` as indented JSON in UTF-8. Characters that could control a terminal are escaped."""
    return _shown(json.dumps(record, ensure_ascii=False, indent=2, allow_nan=False))


def _shown(text: str) -> bytes:
    if not text.isascii() or "\x7f" in text:
        text = re.sub(_UNSAFE, lambda found: f"\\u{ord(found[0]):04x}", text)
    return (text + "\n").encode()


def parse_line(line: bytes | None) -> dict[str, Any] | None:
    """Parse a line of `messages.jsonl` and return its message, or None for an invalid line. It never raises.

    A message has these fields: `msg_id`, `ts`, `from`, `to`, `topic`, `body`, `in_reply_to`, `ttl_s`. It also
    has `priority`, `blob` and those of `FIELDS_IF_GIVEN` if the line has valid ones. Any other field is
    ignored, and so are invalid values of these.

    Args:
        line: The line without its newline. None stands for a line that was too long to read, and gives None.
    """
    if line is None:
        return None
    try:
        # RFC 8259 8.1 lets a reader skip a byte order mark, which editors of Windows write.
        found = _decode(line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return _message(found) if type(found) is dict else None


def is_utf16(line: bytes | None) -> bool:
    """Return whether an invalid line looks like JSON in UTF-16: every second byte of its ASCII is zero.

    No valid line has a zero byte. A line of less than eight bytes is not judged.
    """
    return line is not None and len(line) >= 8 and line.count(0) * 4 >= len(line)


def why_refused(are_utf16: list[bool]) -> str:
    """Return why lines are no messages, for the log. `are_utf16` says of each line whether it is in UTF-16."""
    return f"{sum(are_utf16)} {UTF16_ADVICE}" if any(are_utf16) else "no messages of the queue"


def _message(found: dict[str, Any]) -> dict[str, Any] | None:
    message = {name: found.get(name) for name in _FIELDS}
    msg_id, ts, sender, to, topic, body, reply, ttl_s = message.values()
    try:
        is_valid = (
            is_name(msg_id)
            and is_name(sender)
            and (to is None or is_name(to))
            and (reply is None or is_name(reply))
            and type(topic) is str
            and topic in TOPICS
            and type(ts) is str
            and _seconds(ts) is not None
            and (ttl_s is None or _is_ttl(ttl_s))
            # A lone surrogate cannot be encoded, so the message could not be passed on.
            and type(body) is str
            and body.encode() is not None
        )
    except ValueError:
        return None
    # Not checked as the others: lines had none of these fields at first, and readers ignored any of that name.
    for one in FIELDS_IF_GIVEN:
        value = found.get(one.name)
        if value is not None and one.fault(value, is_name) is None:
            message[one.name] = value
    blob = found.get("blob")
    if type(blob) is dict and _is_blob(blob, str(msg_id)):
        message["blob"] = blob
    priority = found.get("priority")
    if type(priority) is str and priority in PRIORITIES:
        message["priority"] = priority
    return message if is_valid else None


def is_expired(message: Mapping[str, Any], now: float) -> bool:
    """Return whether the message's time to live is over at the time `now`, in seconds since 1970 UTC.

    `message` has the fields of a line, as `parse_line` returns them. A message without a time to live never
    expires.
    """
    if message["ttl_s"] is None:
        return False
    sent = _seconds(message["ts"])
    return sent is not None and sent + float(message["ttl_s"]) <= now


def is_for(message: Mapping[str, Any], agent_id: str) -> bool:
    """Return whether the message is addressed to the agent `agent_id`, or to every agent.

    `message` has the fields of a line, as `parse_line` returns them. Its `to` is an agent's name; None, `all`
    and `broadcast` mean every agent.
    """
    return message["to"] in EVERYBODY or message["to"] == agent_id


def _is_ttl(value: object) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return False
    return math.isfinite(seconds) and seconds >= 0


def _seconds(text: str) -> float | None:
    if not re.fullmatch(_TIME, text, re.ASCII):
        return None
    from datetime import UTC, datetime  # readers only: importing it takes longer than a whole send

    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError("a key stands twice")
        found[key] = value
    return found


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant).decode
