"""The stored progress of the file bridge, and what it reads beside the lines: polls, and known messages.

The progress file says for which consumers the bridge has carried broadcasts, and how far it has read the audit.
Without the file it carries all of that again, and the records settle as duplicates. The audit file has the
polls (FQ-16). The mailbox table has the ids of old messages that the fold may no longer remember (FQ-15).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from connectors.doors.file_bridge.records import poll_in
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import MAILBOX_VIEW
from schemas.tables.delta_files import rows_at
from trunkline_agent.errors import TrunklineError
from trunkline_agent.private_files import replace_file
from trunkline_agent.queue.session_files import AUDIT, complete_lines, open_fd

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
