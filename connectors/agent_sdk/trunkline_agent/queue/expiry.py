"""Remove expired messages from a session's `messages.jsonl`, adjust the cursors, and remove side-files (FQ-08).

A side-file has the body of one message whose body is too long for a line.

An expire may be killed at any time. It writes a plan to the disk before the new file replaces the old one. The
next process with the lock reads the plan. If the new file still has its own name, nothing was changed, and the
plan is dropped. Otherwise the new file is in place, and the cursors are set to the offsets in the plan, however
often.

A sender that was killed before its line leaves a side-file that no line names, an orphan. An expire removes
it under the session's lock if three things are true. No line names the file: not even an invalid line, or the
last one without its newline. The file is older than ORPHAN_AGE_S, for writers that do not use the locks. And
no sender is between its side-file and its line: a sender holds a shared lock on the folder of side-files
until its line is written (`SessionFolder.hold_bodies`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re

from trunkline_agent.queue.cursors import all_cursors, write_cursor
from trunkline_agent.queue.message_record import (
    BLOB_SUFFIX,
    LINE_LIMIT,
    blob_file_of,
    is_expired,
    is_name,
    parse_line,
    side_file_of,
)
from trunkline_agent.queue.queue_errors import QueueError
from trunkline_agent.queue.session_files import (
    BODIES,
    CHUNK_BYTES,
    FOLDER,
    MESSAGES,
    PLAN,
    REWRITE,
    SessionFolder,
    complete_lines,
    open_fd,
    read_range,
    remove,
    replace_file,
    write_all,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set
    from typing import Any

NEW = ".messages.jsonl.new"
_PLAN_LIMIT = 1024 * 1024 * 1024
ORPHAN_AGE_S = 24 * 3600.0
_SUFFIXES = (".txt", BLOB_SUFFIX)
_mentions = re.compile(rb"@file:([A-Za-z0-9][A-Za-z0-9._-]*\.(?:txt|blob))").findall


class _Scan:
    """The expired part of a messages file: ranges of bytes, and side-files that no remaining line names.

    `named` are the side-files that remaining lines name.
    """

    def __init__(self, fd: int, end: int, now: float) -> None:
        self.removed: list[tuple[int, int]] = []
        self.count = 0
        self.named: set[str] = set()
        gone: set[str] = set()
        stop = 0
        for start, stop, line in complete_lines(fd, 0, end):
            message = parse_line(line)
            if message is None or not is_expired(message, now):
                self.named |= names_in(line or b"", message)
                continue
            gone |= names_in(line or b"", message)
            self.count += 1
            if self.removed and self.removed[-1][1] == start:
                start = self.removed.pop()[0]
            self.removed.append((start, stop))
        # The next sender completes a last line that has no newline yet.
        last = read_range(fd, stop, min(end - stop, LINE_LIMIT))
        self.named |= names_in(last, parse_line(last))
        self.side_files = sorted(gone - self.named)

    def kept(self, end: int) -> list[tuple[int, int]]:
        """Return the byte ranges of the old file that stay, up to the offset `end`.

        Invalid lines stay, and so does a last line without its newline.
        """
        starts = [0, *(stop for _, stop in self.removed)]
        stops = [*(start for start, _ in self.removed), end]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def moved(self, offset: int) -> int:
        """Return the offset in the new file that corresponds to `offset` in the old one."""
        return offset - sum(min(stop, offset) - start for start, stop in self.removed if start < offset)


def expire_messages(folder: SessionFolder, now: float, step: Callable[[str], None]) -> tuple[int, int]:
    """Remove the expired messages of a session with their side-files, and also side-files without a message.

    A side-file has the body of one message. A side-file that no line names is an orphan. Orphans older than a
    day are removed. The caller has the session's lock. Without a file `messages.jsonl` nothing is removed,
    because no line says which side-files are in use.

    Args:
        folder: The session's open folder.
        now: The current time in seconds since 1970 UTC.
        step: Called with a name after each step, so that a test can interrupt the work there.

    Returns:
        The number of removed messages, and the number of removed orphans.

    Raises:
        OSError: A file cannot be read or written. The old messages stay, or the next process with the lock
            finishes the work.
    """
    fd = folder.open_file(MESSAGES)
    if fd is None:
        return 0, 0
    with fd:
        end = os.fstat(fd).st_size
        scan = _Scan(fd, end, now)
        plan = _compact(folder, fd, end, scan, step) if scan.count else None
    if plan is not None:
        _finish(folder, plan, step)
    return scan.count, remove_orphans(folder, scan.named, now, step)


def _compact(
    folder: SessionFolder, fd: int, end: int, scan: _Scan, step: Callable[[str], None]
) -> dict[str, Any]:
    """Replace the file by one without the expired messages. Return the plan, for `_finish`."""
    try:
        _write_new(folder, fd, scan.kept(end))
        step("new_file_written")
        cursors = {
            agent: scan.moved(min(offset, end))
            for agent, offset in all_cursors(folder).items()
            if offset is not None
        }
        plan = {"removed": scan.count, "cursors": cursors, "side_files": scan.side_files}
        replace_file(folder.fd, PLAN, json.dumps(plan).encode())
    except BaseException:
        remove(NEW, folder.fd)
        raise
    step("planned")
    _copy_growth(folder, fd, end)
    os.replace(NEW, MESSAGES, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    step("replaced")
    os.fsync(folder.fd)
    return plan


def finish_expire(folder: SessionFolder, step: Callable[[str], None]) -> int | None:
    """Finish or undo the work of a process that was killed while it removed expired messages.

    Call this right after taking the session's lock. `step` is called with a name after each step, for tests.

    Returns:
        The number of messages that the killed process has removed. None if no work of a killed process was
        left, or if that work was undone; in both cases all messages are still in the file.

    Raises:
        QueueError: The plan that the killed process left is invalid. A user has to correct it.
    """
    fd = folder.open_file(PLAN)
    if fd is None:
        return None
    with fd:
        plan = _read_plan(read_range(fd, 0, _PLAN_LIMIT), folder)
    if folder.has(NEW):
        # The plan first: a plan without the new file counts as carried out.
        remove(PLAN, folder.fd)
        os.fsync(folder.fd)
        step("plan_dropped")
        remove(NEW, folder.fd)
        return None
    os.fsync(folder.fd)
    _finish(folder, plan, step)
    return int(plan["removed"])


def _finish(folder: SessionFolder, plan: dict[str, Any], step: Callable[[str], None]) -> None:
    now = all_cursors(folder)
    for agent, offset in plan["cursors"].items():
        if now.get(agent) != offset:
            write_cursor(folder, agent, offset)
        step("cursor_moved")
    folder.remove_bodies(plan["side_files"])
    step("side_files_removed")
    remove(PLAN, folder.fd)
    # A plan that came back after a power cut would set cursors back.
    os.fsync(folder.fd)
    step("plan_removed")


def _write_new(folder: SessionFolder, fd: int, kept: list[tuple[int, int]]) -> None:
    old = os.fstat(fd)
    with open_fd(NEW, REWRITE, folder.fd) as new:
        os.fchmod(new, old.st_mode & 0o777)
        if os.geteuid() == 0:
            os.fchown(new, old.st_uid, old.st_gid)  # its owner goes on using it
        for start, stop in kept:
            _copy(fd, new, start, stop)
        os.fsync(new)


def _copy_growth(folder: SessionFolder, fd: int, end: int) -> None:
    # A writer that does not use the lock may have appended to the old file. Later appends are lost.
    if os.fstat(fd).st_size <= end:
        return
    with open_fd(NEW, os.O_WRONLY | os.O_APPEND, folder.fd) as new:
        _copy(fd, new, end, os.fstat(fd).st_size)
        os.fsync(new)


def _copy(old: int, new: int, start: int, stop: int) -> None:
    while start < stop:
        piece = os.pread(old, min(CHUNK_BYTES, stop - start), start)
        if not piece:
            return
        write_all(new, piece)
        start += len(piece)


def _read_plan(text: bytes, folder: SessionFolder) -> dict[str, Any]:
    try:
        plan = json.loads(text)
        removed, cursors, side_files = plan["removed"], plan["cursors"], plan["side_files"]
        has_offsets = all(is_name(a) and type(at) is int and 0 <= at < 10**19 for a, at in cursors.items())
        has_files = all(isinstance(name, str) and _is_side_file(name) for name in side_files)
        if type(removed) is int and has_offsets and has_files:
            return {"removed": removed, "cursors": cursors, "side_files": side_files}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise QueueError(
        f"{folder.path}/{PLAN} is not a valid plan of an expire: it was changed. Check the agents' offsets in "
        "cursors/, correct them by hand, and delete the plan."
    )


def names_in(line: bytes, message: dict[str, Any] | None) -> set[str]:
    """Return the names of the side-files (files of long bodies) that a line refers to; empty for none.

    A user may later correct an invalid line. So every text in an invalid line that looks like a side-file's
    name counts.

    Args:
        line: The raw line.
        message: The message in the line, as `parse_line` returns it; None for an invalid line.
    """
    if message is None:
        return {name.decode() for name in _mentions(line)}
    return {name for name in (side_file_of(message), blob_file_of(message)) if name is not None}


def remove_orphans(folder: SessionFolder, named: Set[str], now: float, step: Callable[[str], None]) -> int:
    """Delete the side-files that no line names and that are older than a day. Return how many were deleted.

    A side-file has the body of one long message. The caller has the session's lock. While a sender has written
    a side-file and not yet its line, nothing is deleted and 0 is returned at once. A later call deletes the
    orphans then.

    Args:
        folder: The session's open folder.
        named: The names of the side-files that lines refer to, collected with `names_in`. They stay.
        now: The current time in seconds since 1970 UTC.
        step: Called after each deletion, for tests.
    """
    try:
        bodies = open_fd(BODIES, FOLDER, folder.fd)
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
        # Explicitly, as in SessionFolder.unlock.
        fcntl.flock(bodies, fcntl.LOCK_UN)
        os.close(bodies)
    return removed


def _is_side_file(name: str) -> bool:
    stem, dot, suffix = name.rpartition(".")
    return dot + suffix in _SUFFIXES and is_name(stem)


def _is_unfinished(name: str) -> bool:
    """Return whether a killed delivery has left a file; see `side_files.write_content`."""
    return name.startswith(".") and name.endswith(".new") and _is_side_file(name[1 : -len(".new")])


def _side_files(bodies: int, before: float) -> Iterator[str]:
    """Yield the files in the folder that have a side-file's name and were last written before that time."""
    with os.scandir(bodies) as entries:
        for entry in entries:
            if not (_is_side_file(entry.name) or _is_unfinished(entry.name)) or not entry.is_file(
                follow_symlinks=False
            ):
                continue
            try:
                if entry.stat(follow_symlinks=False).st_mtime < before:
                    yield entry.name
            except FileNotFoundError:
                continue
