"""The cursors of the file queue: one small file per agent with the offset up to which it has read (FQ-04).

An offset is a number of bytes in the session's file `messages.jsonl`. The cursor is the acknowledgement:
messages before it were delivered or skipped.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time

from trunkline_agent.queue.message_record import is_expired, is_for, is_name, is_utf16, parse_line
from trunkline_agent.queue.queue_errors import QueueError
from trunkline_agent.queue.session_files import (
    CURSORS,
    FOLDER,
    MESSAGES,
    OpenFile,
    SessionFolder,
    complete_lines,
    open_fd,
    read_range,
    replace_file,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SUFFIX = ".cursor"
# Written with a fixed length, so that a cut one is detected. A user may write a number without leading zeros.
_is_cursor = re.compile(rb"\d{19}\n|0\n|[1-9]\d{0,18}\n?").fullmatch


def read_cursor(folder: SessionFolder, agent_id: str) -> int | None:
    """Return the offset in `messages.jsonl` up to which an agent has read, or None if it has no cursor yet.

    Raises QueueError if the cursor's file has no valid offset. To begin with the first message would deliver
    messages twice, and to go to the end would lose messages. So a user must decide and correct the file.
    """
    fd = folder.open_file(agent_id + SUFFIX, CURSORS)
    if fd is None:
        return None
    with fd:
        text = read_range(fd, 0, 64)
    if not _is_cursor(text):
        raise QueueError(
            f"the cursor {folder.path}/{CURSORS}/{agent_id}{SUFFIX} is not whole. Write to it the offset in "
            "messages.jsonl to go on from, or delete it to begin with the first message."
        )
    return int(text)


def write_cursor(folder: SessionFolder, agent_id: str, offset: int) -> None:
    """Store `offset` as the offset in `messages.jsonl` up to which an agent has read.

    The caller has the session's lock. When this returns, the offset is safe from a power cut. Raises OSError if
    the cursor's file cannot be written; then the old offset stays.
    """
    with folder.open_folder(CURSORS) as cursors:
        replace_file(cursors, agent_id + SUFFIX, b"%019d\n" % offset)


def put_back(folder: SessionFolder, agent_id: str, before: int, after: int) -> None:
    """Move an agent's cursor back from `after` to `before`. The caller has the session's lock.

    Nothing is moved if an expire, or another poll of the agent, has moved the cursor meanwhile.
    """
    if read_cursor(folder, agent_id) == after:
        write_cursor(folder, agent_id, before)


def agents(folder: SessionFolder) -> list[str]:
    """Return the sorted names of the agents that have a cursor in the session, valid or not."""
    try:
        with open_fd(CURSORS, FOLDER, folder.fd) as cursors, os.scandir(cursors) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    found = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    return sorted(agent for agent in found if is_name(agent))


def all_cursors(folder: SessionFolder) -> dict[str, int | None]:
    """Return the offset of each agent that has a cursor in the session; None for an invalid cursor."""
    found: dict[str, int | None] = {}
    for agent in agents(folder):
        try:
            offset = read_cursor(folder, agent)
        except (QueueError, OSError):
            found[agent] = None
            continue
        if offset is not None:
            found[agent] = offset
    return found


def messages_between(
    fd: int, start: int, size: int, agent_id: str, wanted: list[str] | None
) -> tuple[list[dict[str, Any]], int, int]:
    """Return an agent's messages between two offsets of `messages.jsonl`.

    They are those to the agent, of the topics `wanted` (None: of any), that have not expired. The result also
    has the end of the last whole line, and the number of lines in UTF-16, which are skipped.
    """
    now = time.time()
    found, end, utf16 = [], start, 0
    for _, line_end, line in complete_lines(fd, start, size):
        end = line_end
        message = parse_line(line)
        if message is None:
            utf16 += is_utf16(line)
        elif (
            is_for(message, agent_id)
            and (wanted is None or message["topic"] in wanted)
            and not is_expired(message, now)
        ):
            found.append(message)
    return found, end, utf16


def open_messages(folder: SessionFolder) -> OpenFile:
    """Open the session's `messages.jsonl` for appending, or create it. The caller has the session's lock.

    If the file is missing although agents have cursors, a user has deleted it. Then all cursors are set to 0.
    For an empty file, the names of all folders are synced to the disk, so that a power cut cannot remove it.

    Raises:
        OSError: The path is a link or no regular file, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK
    try:
        fd = open_fd(MESSAGES, flags, folder.fd)
    except FileNotFoundError:
        for agent, offset in all_cursors(folder).items():
            if offset:
                write_cursor(folder, agent, 0)
        fd = open_fd(MESSAGES, flags | os.O_CREAT, folder.fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", MESSAGES)
        if os.fstat(fd).st_size == 0:
            folder.sync_path()
    except BaseException:
        os.close(fd)
        raise
    return fd
