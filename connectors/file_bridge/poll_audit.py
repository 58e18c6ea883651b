"""The polls in the queue's audit file, from where the bridge has read it (FQ-16)."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from connectors.file_bridge.records import poll_in
from connectors.file_queue.audit_log import AUDIT
from connectors.file_queue.session_files import complete_lines

# What is read at once; the rest comes with the next look.
_BYTES: Final = 8 * 1024 * 1024


class AuditPlace(NamedTuple):
    """How far the audit was read: the file's number, and the offset in it."""

    inode: int = 0
    offset: int = 0


class PollsRead(NamedTuple):
    """The polls that have taken something, oldest first, and where to go on."""

    polls: list[Mapping[str, Any]]
    place: AuditPlace


def read_polls(root: str, place: AuditPlace) -> PollsRead:
    """The polls in the complete lines after `place`. A file that is another one, or shorter, is read anew."""
    try:
        fd = os.open(f"{root}/{AUDIT}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # there is none yet, or it is none of ours
        return PollsRead([], place)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return PollsRead([], place)
        start = place.offset if status.st_ino == place.inode and place.offset <= status.st_size else 0
        found, end = [], start
        for _, line_end, line in complete_lines(fd, start, status.st_size):
            poll = poll_in(_decoded(line))
            if poll is not None:
                found.append(poll)
            end = line_end
            if end - start > _BYTES:
                break
        return PollsRead(found, AuditPlace(status.st_ino, end))
    finally:
        os.close(fd)


def _decoded(line: bytes | None) -> Any:
    try:
        return None if line is None else json.loads(line)
    except (ValueError, RecursionError):
        return None
