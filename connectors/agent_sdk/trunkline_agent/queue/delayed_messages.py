"""The delayed messages of a session: each in a file of its own, until it is appended to the others (DL-22).

The file `delayed/<time>-<msg_id>.json` has the message's line with its whole body. The time is the one at
which the message is due, in microseconds since 1970 UTC. So programs that know nothing of delays never see the
message before it is due, and find an ordinary line after that.

A release may be killed at any time. It makes a mark before it appends lines, and removes it after it has
deleted their files. The next process with the lock that finds the mark looks up which lines were appended.
"""

from __future__ import annotations

import errno
import os
import re

from trunkline_agent.queue.cursors import open_messages
from trunkline_agent.queue.message_record import (
    BODY_LIMIT,
    LINE_LIMIT,
    NAME_LIMIT,
    checked_name,
    is_expired,
    parse_line,
    to_line,
)
from trunkline_agent.queue.session_files import (
    DELAYED,
    SessionFolder,
    append,
    complete_lines,
    read_range,
    remove,
    replace_file,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from typing import Any

MARK = "release.mark"
# How many messages are released at once, with few calls of fsync. Their bodies are in memory together.
_BATCH = 50
# JSON escapes one byte with six characters at most.
_FILE_LIMIT = 6 * BODY_LIMIT + 4096
_BEGINNING = b'{"msg_id":"'
_named = re.compile(rf"(\d{{17}})-([A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LIMIT - 1}}})\.json").fullmatch


def store_delayed(folder: SessionFolder, record: dict[str, Any], due_s: float) -> None:
    """Store a message on the disk until its time. The caller has the session's lock.

    Args:
        folder: The session's open folder.
        record: The fields of the message's line, with the whole body.
        due_s: The time before which no agent gets the message, in seconds since 1970 UTC.

    Raises:
        OSError: The file cannot be written. The message is then not stored.
        ValueError: The message has a number that JSON does not have.
    """
    name = f"{round(due_s * 1_000_000):017d}-{checked_name(record['msg_id'], 'the message')}.json"
    with folder.open_folder(DELAYED) as delayed:
        replace_file(delayed, name, to_line(record))
    folder.sync_path()


def delayed_names(folder: SessionFolder, until_s: float | None = None) -> list[str]:
    """Return the names of the files of delayed messages, those that are due first at the start.

    `until_s` is a time in seconds since 1970 UTC. Messages that are due later are left out; None for all.
    """
    names = _names(folder)
    until_us = None if until_s is None else until_s * 1_000_000
    return sorted(
        name for name in names if (found := _named(name)) and (until_us is None or int(found[1]) <= until_us)
    )


def _names(folder: SessionFolder) -> list[str]:
    try:
        return os.listdir(f"{folder.path}/{DELAYED}")  # noqa: PTH208 - see message_queue
    except (FileNotFoundError, NotADirectoryError):
        return []


def release_due(
    folder: SessionFolder,
    now: float,
    line_of: Callable[[dict[str, Any]], tuple[bytes, str | None, bytes]],
    step: Callable[[str], None],
) -> list[str]:
    """Append the delayed messages whose time has come to the session's messages, and return their ids.

    The caller has the session's lock. Expired messages are deleted instead. A file that is no message is
    renamed to `<name>.bad`.

    Args:
        folder: The session's open folder.
        now: The current time in seconds since 1970 UTC.
        line_of: Returns the line of a message, the name of its side-file or None, and its body.
        step: Called with a name after each step, so that a test can interrupt the work there.

    Raises:
        OSError: A file cannot be read or written. The remaining messages stay delayed.
        QueueError: A line was written in part and could not be removed.
    """
    released: list[str] = []
    # Killed senders have left these: a sender has the lock until its file is whole.
    if unfinished := [name for name in _names(folder) if name.startswith(".")]:
        _delete(folder, unfinished)
    if folder.has(MARK):
        _finish_killed(folder, step)
    while names := delayed_names(folder, now)[:_BATCH]:
        found = {name: record for name in names if (record := _read(folder, name)) is not None}
        left = {name: record for name, record in found.items() if not is_expired(record, now)}
        if left:
            replace_file(folder.fd, MARK, b"")
            step("release_marked")
            _append(folder, list(left.values()), line_of, step)
        _delete(folder, list(found))
        step("delayed_deleted")
        if left:
            remove(MARK, folder.fd)
            os.fsync(folder.fd)
            step("mark_removed")
        released += [record["msg_id"] for record in left.values()]
    return released


def _append(
    folder: SessionFolder,
    records: list[dict[str, Any]],
    line_of: Callable[[dict[str, Any]], tuple[bytes, str | None, bytes]],
    step: Callable[[str], None],
) -> None:
    with open_messages(folder) as fd:
        for record in records:
            line, side_file, text = line_of(record)
            if side_file:
                folder.remove_bodies([side_file])  # left from a release that was killed before its line
                folder.write_body(side_file, text)
                step("due_side_file_written")
            append(fd, line)
            step("due_appended")
        os.fsync(fd)


def _finish_killed(folder: SessionFolder, step: Callable[[str], None]) -> None:
    """Delete the files of the messages whose lines a killed release has appended, and its mark."""
    names = {_id_of(name): name for name in delayed_names(folder)}
    with open_messages(folder) as fd:
        size = os.fstat(fd).st_size
        present: set[str] = set()
        end = 0
        for _, line_end, line in complete_lines(fd, 0, size):
            present |= _ids_in(line or b"", names.keys())
            end = line_end
        last = read_range(fd, end, min(size - end, LINE_LIMIT))
        if parse_line(last) is not None and _ids_in(last, names.keys()):
            # The release was killed before the newline alone, and another append would write the line again.
            append(fd, b"")
            present |= _ids_in(last, names.keys())
        os.fsync(fd)
    _delete(folder, [names[one] for one in present])
    step("killed_release_finished")
    remove(MARK, folder.fd)
    os.fsync(folder.fd)


def _ids_in(line: bytes, ids: Set[str]) -> Set[str]:
    """Return the message's id as a set, if the line begins as ours do and has one of these ids."""
    if not line.startswith(_BEGINNING):
        return set()
    found = line[len(_BEGINNING) : len(_BEGINNING) + NAME_LIMIT + 1].partition(b'"')[0]
    return {found.decode("utf-8", "replace")} & ids


def _read(folder: SessionFolder, name: str) -> dict[str, Any] | None:
    """Return the message in a file; None for an invalid file, which is then renamed."""
    try:
        fd = folder.open_file(name, DELAYED)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL):  # a link, or no file
            raise
        fd = None
    if fd is not None:
        with fd:
            text = read_range(fd, 0, _FILE_LIMIT)
        record = parse_line(text.removesuffix(b"\n"))
        if record is not None and record["msg_id"] == _id_of(name):
            return record
    with folder.open_folder(DELAYED) as delayed:
        os.replace(name, f"{name}.bad", src_dir_fd=delayed, dst_dir_fd=delayed)
    return None


def _id_of(name: str) -> str:
    return name[18:].removesuffix(".json")


def _delete(folder: SessionFolder, names: list[str]) -> None:
    with folder.open_folder(DELAYED) as delayed:
        for name in names:
            remove(name, delayed)
        os.fsync(delayed)
