"""Taking expired messages out of a session's file, and moving the cursors with it (FQ-08).

It may be killed anywhere. Before the new file takes the old one's place a plan is on the disk; whoever has
the lock next goes by it. Is the new file still there under its own name, nothing has happened yet, and the
plan is dropped. Is it not, the new file is in place, and the cursors get the offsets of the plan, which are
the same ones however often they are set. At the end side-files go that no line names (`orphans`).
"""

from __future__ import annotations

import json
import os

from connectors.file_queue.cursors import all_cursors, write_cursor
from connectors.file_queue.message_record import LINE_LIMIT, is_expired, is_name, parse_line, side_file_of
from connectors.file_queue.orphans import names_in, remove_orphans
from connectors.file_queue.queue_errors import QueueError
from connectors.file_queue.session_files import (
    CHUNK_BYTES,
    FILE_MODE,
    MESSAGES,
    PLAN,
    SessionFolder,
    complete_lines,
    read_range,
    remove,
    replace_file,
    write_all,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NEW = ".messages.jsonl.new"
_PLAN_LIMIT = 1024 * 1024 * 1024


class _Scan:
    """What is to go from a messages file: ranges of bytes, and side-files that nothing kept names. `named` are
    those that something names.
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
            side_file = side_file_of(message)
            if side_file is not None:
                gone.add(side_file)
            self.count += 1
            if self.removed and self.removed[-1][1] == start:
                start = self.removed.pop()[0]
            self.removed.append((start, stop))
        # The next sender makes a line of what has no newline yet.
        last = read_range(fd, stop, min(end - stop, LINE_LIMIT))
        self.named |= names_in(last, parse_line(last))
        self.side_files = sorted(gone - self.named)

    def kept(self, end: int) -> list[tuple[int, int]]:
        """The ranges that stay, up to `end`: also what is no message, and a last line without its newline."""
        starts = [0, *(stop for _, stop in self.removed)]
        stops = [*(start for start, _ in self.removed), end]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def moved(self, offset: int) -> int:
        """Where the same place is in the new file."""
        return offset - sum(min(stop, offset) - start for start, stop in self.removed if start < offset)


def expire_messages(folder: SessionFolder, now: float, step: Callable[[str], None]) -> tuple[int, int]:
    """Compact the session's file, under its lock. Returns how many messages went, and how many side-files that
    no message named. Without a file of messages nothing can tell which those are, and nothing goes.
    """
    fd = folder.open_file(MESSAGES)
    if fd is None:
        return 0, 0
    try:
        end = os.fstat(fd).st_size
        scan = _Scan(fd, end, now)
        plan = _compact(folder, fd, end, scan, step) if scan.count else None
    finally:
        os.close(fd)
    if plan is not None:
        _finish(folder, plan, step)
    return scan.count, remove_orphans(folder, scan.named, now, step)


def _compact(
    folder: SessionFolder, fd: int, end: int, scan: _Scan, step: Callable[[str], None]
) -> dict[str, Any]:
    """Put a new file without what is to go in the old one's place. Returns the plan, to be finished."""
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
    """Bring an expire that was killed to its end, or take it back; under the lock, before anything else.

    Returns how many messages it took away, or None if there was nothing to finish.
    """
    fd = folder.open_file(PLAN)
    if fd is None:
        return None
    try:
        plan = _read_plan(read_range(fd, 0, _PLAN_LIMIT), folder)
    finally:
        os.close(fd)
    if _exists(folder, NEW):
        # The plan first: without the new file it would count as carried out.
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
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    new = os.open(NEW, flags, FILE_MODE, dir_fd=folder.fd)
    try:
        os.fchmod(new, old.st_mode & 0o777)
        if os.geteuid() == 0:
            os.fchown(new, old.st_uid, old.st_gid)  # its owner goes on using it
        for start, stop in kept:
            _copy(fd, new, start, stop)
        os.fsync(new)
    finally:
        os.close(new)


def _copy_growth(folder: SessionFolder, fd: int, end: int) -> None:
    # A writer that knows nothing of the lock may have added to the old file. What it adds after this is lost.
    if os.fstat(fd).st_size <= end:
        return
    new = os.open(NEW, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, dir_fd=folder.fd)
    try:
        _copy(fd, new, end, os.fstat(fd).st_size)
        os.fsync(new)
    finally:
        os.close(new)


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
        cursors, side_files = plan["cursors"], plan["side_files"]
        if (
            all(is_name(agent) and type(offset) is int and offset >= 0 for agent, offset in cursors.items())
            and all(
                isinstance(name, str) and name.endswith(".txt") and is_name(name.removesuffix(".txt"))
                for name in side_files
            )
            and type(plan["removed"]) is int
        ):
            return {"removed": plan["removed"], "cursors": cursors, "side_files": side_files}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise QueueError(
        f"{folder.path}/{PLAN} is no plan of an expire: somebody has changed it. Look where the agents stand "
        "(cursors/), mend that by hand and delete the plan."
    )


def _exists(folder: SessionFolder, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
