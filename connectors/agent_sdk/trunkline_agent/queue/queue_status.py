"""Looks at a file queue that change nothing: its last messages, and its numbers (FQ-07)."""

from __future__ import annotations

import os
import time

from trunkline_agent.queue.cursors import all_cursors
from trunkline_agent.queue.message_record import TOPICS, is_expired, is_name, is_utf16, parse_line
from trunkline_agent.queue.session_files import (
    BODIES,
    DELAYED,
    MESSAGES,
    SessionFolder,
    complete_lines,
    complete_lines_backward,
)
from trunkline_agent.queue.side_files import with_body

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SUMMED = ("messages", "expired", "unparseable", "utf16", "delayed", "bytes")


def last_messages(root: str, session: str, n: int, include_expired: bool) -> list[dict[str, Any]]:
    """Return the last `n` messages of a session to any recipient, oldest first; empty without such a session.

    `root` is the queue's folder. Expired messages count with `include_expired` alone. It takes no lock. Raises
    OSError if a file cannot be read.
    """
    found: list[dict[str, Any]] = []
    try:
        folder = SessionFolder(root, session, create=False)
    except FileNotFoundError:
        return []
    with folder:
        if not n or (fd := folder.open_file(MESSAGES)) is None:
            return []
        with fd:
            now = time.time()
            for line in complete_lines_backward(fd, os.fstat(fd).st_size):
                message = parse_line(line)
                if message is not None and (include_expired or not is_expired(message, now)):
                    found.append(with_body(folder, message))
                    if len(found) == n:
                        break
    return found[::-1]


def queue_status(root: str, session: str | None) -> dict[str, Any]:
    """Count the messages and bytes of one session, or of all sessions if `session` is None.

    `root` is the queue's folder. A missing folder or session counts as empty. It takes no lock. Raises OSError
    if a file cannot be read.

    Returns:
        The sums `messages`, `expired`, `unparseable` (invalid lines), `utf16` (those of them in UTF-16),
        `delayed` and `bytes`; the messages `per_topic`; and under `sessions` the same for each session, with
        each agent's cursor (None for an invalid one).
    """
    sessions = {name: _session_status(root, name) for name in ([session] if session else _sessions(root))}
    sums = {what: sum(one[what] for one in sessions.values()) for what in _SUMMED}
    per_topic = {topic: sum(one["per_topic"][topic] for one in sessions.values()) for topic in sorted(TOPICS)}
    return {"root": root, **sums, "per_topic": per_topic, "sessions": sessions}


def _sessions(root: str) -> list[str]:
    try:
        with os.scandir(f"{root}/sessions") as entries:
            return sorted(entry.name for entry in entries if is_name(entry.name) and entry.is_dir())
    except FileNotFoundError:
        return []


def _session_status(root: str, session: str) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(_SUMMED, 0)
    per_topic = dict.fromkeys(sorted(TOPICS), 0)
    cursors: dict[str, int | None] = {}
    try:
        with SessionFolder(root, session, create=False) as folder:
            cursors = all_cursors(folder)
            found["bytes"] = _bytes_of_bodies(folder)
            if folder.has(DELAYED):
                from trunkline_agent.queue.delayed_messages import delayed_names

                found["delayed"] = len(delayed_names(folder))
            fd = folder.open_file(MESSAGES)
            if fd is not None:
                with fd:
                    _count(fd, found, per_topic)
    except FileNotFoundError:
        pass
    return {**found, "per_topic": per_topic, "cursors": cursors}


def _count(fd: int, found: dict[str, Any], per_topic: dict[str, int]) -> None:
    size = os.fstat(fd).st_size
    found["bytes"] += size
    now = time.time()
    for _, _, line in complete_lines(fd, 0, size):
        message = parse_line(line)
        if message is None:
            found["unparseable"] += 1
            found["utf16"] += is_utf16(line)
            continue
        found["messages"] += 1
        found["expired"] += is_expired(message, now)
        per_topic[message["topic"]] += 1


def _bytes_of_bodies(folder: SessionFolder) -> int:
    total = 0
    try:
        with os.scandir(f"{folder.path}/{BODIES}") as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # an expire may be running
                    continue
    except FileNotFoundError:
        return 0
    return total
