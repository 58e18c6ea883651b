"""Side-files that no line names: what a sender leaves that was killed before its line (FQ-08).

An expire takes them, under the session's lock, when three things hold. No line names the file, not even one
that is no message, or the last one without its newline. The file is older than ORPHAN_AGE_S: that is for a
writer that is no user of the locks. And no sender is between its side-file and its line: each holds the folder
of side-files shared until its line is written (`SessionFolder.hold_bodies`), however long that takes.
"""

from __future__ import annotations

import fcntl
import os
import re

from connectors.file_queue.message_record import is_name, side_file_of
from connectors.file_queue.session_files import BODIES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set
    from typing import Any

    from connectors.file_queue.session_files import SessionFolder

ORPHAN_AGE_S = 24 * 3600.0
_SUFFIX = ".txt"
_mentions = re.compile(rb"@file:([A-Za-z0-9][A-Za-z0-9._-]*\.txt)").findall


def names_in(line: bytes, message: dict[str, Any] | None) -> set[str]:
    """The side-files that a line names; `message` is the one in it. If there is none, somebody may mend the
    line: then whatever looks like a name is one.
    """
    if message is None:
        return {name.decode() for name in _mentions(line)}
    side_file = side_file_of(message)
    return set() if side_file is None else {side_file}


def remove_orphans(folder: SessionFolder, named: Set[str], now: float, step: Callable[[str], None]) -> int:
    """Delete the side-files that are not `named`, under the session's lock. Returns how many went.

    While a sender is between its side-file and its line none goes: the next expire comes to it.
    """
    try:
        bodies = os.open(BODIES, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder.fd)
    except FileNotFoundError:
        return 0
    removed = 0
    try:
        fcntl.flock(bodies, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in sorted(set(_side_files(bodies, now - ORPHAN_AGE_S)) - named):
            try:
                os.unlink(name, dir_fd=bodies)
            except (FileNotFoundError, PermissionError):
                continue
            removed += 1
            step("orphan_removed")
    except BlockingIOError:
        return 0
    finally:
        # Said explicitly, as in SessionFolder.unlock.
        fcntl.flock(bodies, fcntl.LOCK_UN)
        os.close(bodies)
    return removed


def _side_files(bodies: int, before: float) -> Iterator[str]:
    """The files in the folder that have a side-file's name and were last written before that time."""
    with os.scandir(bodies) as entries:
        for entry in entries:
            stem = entry.name.removesuffix(_SUFFIX)
            if stem == entry.name or not is_name(stem) or not entry.is_file(follow_symlinks=False):
                continue
            try:
                if entry.stat(follow_symlinks=False).st_mtime < before:
                    yield entry.name
            except FileNotFoundError:
                continue
