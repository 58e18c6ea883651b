"""Conversion of lines of the file queue to records, and of messages to lines; and the bridge's stored progress.

The progress file says for which consumers the bridge has carried broadcasts, and how far it has read the audit.
Without the file it carries all of that again, and the records settle as duplicates. The audit file has the
polls (FQ-16). The mailbox table has the ids of old messages that the fold may no longer remember (FQ-15).
"""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from schemas.settings.settings import Settings
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.mailboxes.mailbox_bodies import LIMIT_MOST, MailboxClaim
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_POSTED, Message
from schemas.streams.mailboxes.message_text import note_of_blob, shown_text
from schemas.tables.delta_files import rows_at
from schemas.wire.record import JSON_CONTENT, OVERSIZE_PREFIX_BYTES, OutgoingRecord, refused_stream
from trunkline_agent.errors import TrunklineError
from trunkline_agent.private_files import replace_file
from trunkline_agent.queue import TOPICS
from trunkline_agent.queue.message_record import EVERYBODY, NAME_LIMIT, is_name
from trunkline_agent.queue.session_files import AUDIT, complete_lines, open_fd
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS

DOOR: Final = "file"
# Any program that may write the files may write any name into them.
PRINCIPAL: Final = "unverified"
TEXT: Final = "text/plain"
NORMAL: Final = "normal"
_BEGINNING: Final = b'{"msg_id":"'
_TO_ONE: Final = re.compile(
    rb'\{"msg_id":"[\w.-]+","ts":"[\w:.+-]+","from":"[\w.-]+","to":"(?!all"|broadcast")[\w.-]+","topic":'
).match
_NAMESPACE: Final = uuid.UUID("7b1c6a34-7f0e-5b38-8a5d-4f1f3c0b6d11")
# An expiry this far away counts as none.
_FOR_EVER_S: Final = 7_000 * 365 * 24 * 3600.0

Line = Mapping[str, Any]
"""A message as the queue's library reads it from a line, with its body."""


def is_to_everybody(message: Line) -> bool:
    """Return whether a message of the file queue is addressed to every agent that polls.

    `message` has the fields that `file_queue.parse_line` returns.
    """
    return message["to"] in EVERYBODY


def posting_of(
    message: Line,
    session: str,
    recipient: str,
    limits: Mapping[str, int | None] | None = None,
    blob: BlobReference | None = None,
) -> OutgoingRecord:
    """Return the record that posts a message of the file queue to the mailbox `<session>/<recipient>`.

    The session of the queue is the realm of the mailbox. Raises ValueError if the message does not fit the
    rules of messages in the log, such as a body that is too long.

    Args:
        message: The fields of the message with its whole body, as `Queue.poll` returns them.
        session: The session of the queue.
        recipient: The agent's name. A message to every agent needs one record for each agent.
        limits: The limits of the mailbox, as fields of the class `Message`; None for no limits.
        blob: The blob that has the body, which the bridge itself has uploaded. None: `message` has the body.
            A field `blob` of `message` is ignored, because anybody may have written it.
    """
    try:
        posted = Message.model_validate(
            {
                "message_id": message["msg_id"],
                "realm": session,
                "from": message["from"],
                "to": recipient,
                "kind": message["topic"],
                "priority": message.get("priority", NORMAL),
                "body": message["body"] if blob is None else note_of_blob(blob.bytes),
                "content_type": TEXT,
                "blob": blob,
                **{one.name: message.get(one.name) for one in MESSAGE_FIELDS},
                "sent_at": message["ts"],
                "expires_at": _expires_at(message),
                "broadcast_id": message["msg_id"] if is_to_everybody(message) else None,
                **(limits or {}),
            }
        )
    except ValidationError as error:
        raise ValueError("cannot be represented as a message") from error
    return posted.record(door=DOOR, principal=PRINCIPAL)


def refusal_of(session: str, line: bytes) -> OutgoingRecord:
    """Return the record that stores an invalid line of the file queue in the stream `refused/file`.

    The record has at most the first KiB of the line. Its id depends on the session and the line alone, so a
    repeated record is a duplicate.
    """
    return OutgoingRecord(
        stream=refused_stream(DOOR),
        ce_id=content_id(DOOR.encode(), session.encode(), line),
        door=DOOR,
        principal=PRINCIPAL,
        type=MESSAGE_POSTED,
        value=line[:OVERSIZE_PREFIX_BYTES],
    )


def claims_of(poll: Mapping[str, Any]) -> Iterator[OutgoingRecord]:
    """Yield the records that mark the messages of a poll as taken by the agent that polled (FQ-16).

    `poll` is the poll's entry in the queue's audit file, as `poll_in` returns it. The ids of the records depend
    on this entry alone, so repeated records are duplicates.
    """
    yield from claims_of_ids(poll["session"], poll["agent_id"], poll["msg_ids"], poll["ts"])


def claims_of_ids(session: str, agent: str, taken: Sequence[str], about: str) -> Iterator[OutgoingRecord]:
    """Yield the records that mark messages with these ids as taken by an agent.

    The ids of the records depend on the arguments alone. `about` tells claims of the same messages apart.
    """
    for first in range(0, len(taken), LIMIT_MOST):
        some = taken[first : first + LIMIT_MOST]
        request = uuid.uuid5(_NAMESPACE, f"{session}/{agent}/{about}/{'/'.join(some)}")
        yield MailboxClaim(
            realm=session, to=agent, request_id=str(request), message_ids=list(some), limit=LIMIT_MOST
        ).record(door=DOOR, principal=PRINCIPAL)


def poll_in(entry: Any) -> Mapping[str, Any] | None:
    """Return `entry` if it is the audit entry of a poll that took messages, else None.

    `entry` is the JSON value of one line of the queue's audit file.
    """
    if not isinstance(entry, dict) or entry.get("op") != "poll":
        return None
    taken, ts = entry.get("msg_ids"), entry.get("ts")
    named = all(is_name(entry.get(name)) for name in ("session", "agent_id"))
    is_list = isinstance(taken, list) and all(is_name(one) for one in taken)
    # Any program may have written the line. A text that UTF-8 cannot encode cannot be part of an id.
    return entry if named and is_list and taken and isinstance(ts, str) and ts.isascii() else None


def line_of(message: Mapping[str, Any], sent_at: str) -> dict[str, Any]:
    """Return the fields of a line of the file queue, for `Queue.deliver`, for a message of another door.

    A type of message that is no topic of the queue becomes `broadcast` for broadcasts, else `ask`.

    Args:
        message: The message with the field names of the class `Message`, such as `from`, `to` and `kind`.
        sent_at: The time when the message was logged, in ISO 8601. It is used for a message without a sending
            time.

    Raises:
        ValueError: `sent_at` is not a time.
    """
    kind = message["kind"]
    topic = kind if kind in TOPICS else "broadcast" if message.get("broadcast_id") else "ask"
    sent = _moment(message.get("sent_at") or sent_at) or _moment(sent_at)
    if sent is None:
        raise ValueError("not a time")
    end = _expiry(message, sent_at)
    priority = message.get("priority", NORMAL)
    carried = {one.name: message[one.name] for one in MESSAGE_FIELDS if message.get(one.name) is not None}
    return {
        "msg_id": message["message_id"],
        "ts": _text(sent),
        "from": message["from"],
        "to": message["to"],
        "topic": topic,
        "body": shown_text(message["body"], message.get("content_type", JSON_CONTENT))[0],
        "in_reply_to": None,
        "ttl_s": None if end is None else max(0.0, (end - sent).total_seconds()),
        **carried,
        **({} if priority == NORMAL else {"priority": priority}),
    }


def _expiry(message: Mapping[str, Any], logged_at: str) -> datetime | None:
    """Return when a message of another door expires: by its sender, or counted from the time in the log."""
    expires_in_ms = message.get("expires_in_ms")
    if expires_in_ms is None:
        return _moment(message.get("expires_at") or "")
    logged = _moment(logged_at)
    return None if logged is None else logged + timedelta(milliseconds=expires_in_ms)


def may_be_to_everybody(line: bytes) -> bool:
    """Return False if a line is certainly addressed to one agent, without parsing the JSON.

    True means that the line has to be parsed to know whether it is addressed to every agent.
    """
    return _TO_ONE(line) is None


def may_be_of(line: bytes | None, message_ids: Set[str]) -> bool:
    """Return False if a line certainly has none of the ids `message_ids`, without parsing the JSON.

    True means that the line has to be parsed to know. None, for an over-long line, gives False.
    """
    if line is None or not line.startswith(_BEGINNING):
        return line is not None
    found, _, _ = line[len(_BEGINNING) : len(_BEGINNING) + NAME_LIMIT + 1].partition(b'"')
    return b"\\" in found or found.decode("utf-8", "replace") in message_ids


def sent_at_s(message: Line) -> float | None:
    """Return the sending time of a message of the file queue, in seconds since 1970 UTC.

    None means that the message's time is outside of the years that Python's `datetime` can represent.
    """
    moment = _moment(message["ts"])
    return None if moment is None else moment.timestamp()


def _expires_at(message: Line) -> str | None:
    ttl_s = message["ttl_s"]
    if ttl_s is None or ttl_s > _FOR_EVER_S:
        return None
    moment = _moment(message["ts"])
    if moment is None:
        return None
    try:
        return _text(moment + timedelta(seconds=float(ttl_s)))
    except OverflowError:
        return None


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):  # in UTC the year may be before 1 or after 9999
        return None


def _text(moment: datetime) -> str:
    # Not strftime: it writes the year 99 with two digits.
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


# How much of the audit is read at once.
_BYTES: Final = 8 * 1024 * 1024


class AuditPlace(NamedTuple):
    """The place up to which the queue's audit file was read: its inode number, and an offset in bytes."""

    inode: int = 0
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class PollsRead(NamedTuple):
    """The audit's entries of polls that took messages, oldest first, and the place to read on from."""

    polls: list[Mapping[str, Any]]
    place: AuditPlace


class Progress(msgspec.Struct):
    """The progress of the bridge, stored in one JSON file.

    Attributes:
        served: By session, the agents that have got all broadcasts before the bridge's cursor.
        audit: The place up to which the polls in the audit were carried.
        stuck: The sessions that cannot be carried, with the reasons (FQ-18).
        held: By session, the recipients whose lines wait in the files, with the reasons (LM-08).
        own_mailboxes: The mailboxes of the realm `default` with limits of their own, by the gateway's last
            answer.
    """

    served: dict[str, set[str]] = {}
    audit: AuditPlace = AuditPlace()
    stuck: dict[str, str] = {}
    held: dict[str, dict[str, str]] = {}
    own_mailboxes: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> Progress:
        """Read the progress from the file `path`.

        A missing or invalid file gives an empty progress: then the bridge carries everything again.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
            return cls()

    def save(self, path: Path) -> None:
        """Write the progress to the file `path` in one step, with its folder if that is missing.

        Raises OSError; then the old file stays.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(self, order="deterministic"))


def progress_file(settings: Settings) -> Path:
    """Return the path of the bridge's progress file."""
    return settings.data_path / "file_bridge" / "progress.json"


def read_polls(root: str, place: AuditPlace) -> PollsRead:
    """Read the polls in the queue's audit file after `place`, at most about 8 MiB of the file.

    `root` is the queue's folder. Only lines that end with a newline are read. If the file at `place` was
    replaced or shortened, the file is read from its start. For a missing or unreadable file, no polls and the
    same place are returned.
    """
    try:
        audit = open_fd(f"{root}/{AUDIT}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # missing, or a link
        return PollsRead([], place)
    with audit as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return PollsRead([], place)
        start = place.offset if status.st_ino == place.inode and place.offset <= status.st_size else 0
        found, end = [], start
        for _, line_end, line in complete_lines(fd, start, status.st_size):
            with suppress(ValueError, RecursionError):  # not JSON
                if (poll := poll_in(None if line is None else json.loads(line))) is not None:
                    found.append(poll)
            end = line_end
            if end - start > _BYTES:
                break
        return PollsRead(found, AuditPlace(status.st_ino, end))


class ViewUnreadable(TrunklineError):
    """The mailbox table exists but cannot be read at present. A later attempt may succeed."""


def known_messages(settings: Settings, realm: str, message_ids: Sequence[str]) -> set[tuple[str, str]]:
    """Return the recipient and the id of each message in `message_ids` that the mailbox table already has.

    `realm` is a realm of mailboxes; for the bridge it is the name of a session of the queue. Mailboxes of other
    realms do not count. The set is empty while there is no table. Raises ViewUnreadable if the table cannot be
    read.
    """
    wanted = (pc.field("realm") == realm) & pc.field("message_id").isin(pa.array(message_ids, pa.string()))
    try:
        found = rows_at(settings.table_path(MAILBOX_VIEW), ["recipient", "message_id"], wanted)
    except TrunklineError as error:
        raise ViewUnreadable(str(error)) from error
    return set() if found is None else {(row["recipient"], row["message_id"]) for row in found.to_pylist()}
