"""The cursors: how far each consumer has read, one small file per agent with an offset (FQ-04).

The cursor is the acknowledgement: messages before it were delivered or skipped.
"""

from __future__ import annotations

import errno
import os
import re
import stat

from connectors.file_queue.message_record import is_name
from connectors.file_queue.queue_errors import QueueError
from connectors.file_queue.session_files import (
    CURSORS,
    FOLDER,
    MESSAGES,
    OpenFile,
    SessionFolder,
    open_fd,
    read_range,
    replace_file,
)

SUFFIX = ".cursor"
# Written with a fixed length, so that a cut one is detected. A user may write a number without leading zeros.
_is_cursor = re.compile(rb"\d{19}\n|0\n|[1-9]\d{0,18}\n?").fullmatch


def read_cursor(folder: SessionFolder, agent_id: str) -> int | None:
    """Return an agent's offset, or None if it has none yet.

    Raises QueueError for an invalid file. To begin with the first message would deliver twice, and to go to the
    end would lose messages, so the user must decide.
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
    """Write an agent's offset to the disk. After the return it is safe from a power cut."""
    with folder.open_folder(CURSORS) as cursors:
        replace_file(cursors, agent_id + SUFFIX, b"%019d\n" % offset)


def agents(folder: SessionFolder) -> list[str]:
    """Return the agents that have a cursor."""
    try:
        with open_fd(CURSORS, FOLDER, folder.fd) as cursors, os.scandir(cursors) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    found = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    return sorted(agent for agent in found if is_name(agent))


def all_cursors(folder: SessionFolder) -> dict[str, int | None]:
    """Return every agent's offset, None for an invalid file."""
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


def open_messages(folder: SessionFolder) -> OpenFile:
    """Open the session's file of messages for appending, under the lock.

    If the file is missing but has cursors, it was deleted, and all consumers begin anew. The names of all
    folders are synced to the disk before the first line is written.
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
