"""The carrying of one session of the file queue to mailboxes (FQ-15): each line once, to each recipient.

**Reads** the session's messages from the bridge's own cursor on. The bridge is a consumer like any other, so an
expire adjusts its cursor. **Owns** that cursor.
**Guarantees** that the cursor moves only over lines that Kafka has. A bridge that is killed before that carries
the lines again under the same ids, and they settle as duplicates.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from connectors.file_bridge.queue_root import lock_soon
from connectors.file_bridge.records import (
    is_to_everybody,
    may_be_to_everybody,
    posting_of,
    refusal_of,
    sent_at_s,
)
from connectors.file_queue.cursors import agents, read_cursor, write_cursor
from connectors.file_queue.message_record import CARRIED_MARK, EVERYBODY, parse_line, with_body
from connectors.file_queue.queue_errors import QueueError
from connectors.file_queue.session_files import MESSAGES, SessionFolder, complete_lines
from schemas.wire.record import OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

# The bridge's name as a consumer.
CONSUMER: Final = "trunkline-bridge"
# How much is carried before the cursor moves, and kept in memory at once.
_LINES: Final = 1000
_BYTES: Final = 8 * 1024 * 1024

# How long to wait for a session's lock. Longer after the lines were carried, when only the cursor has to move.
_LOCK_S: Final = 0.25
_LOCK_TO_NOTE_S: Final = 2.0

# Mailboxes remember ids for a week of the log's time. The time in a line is by its sender's clock.
_OLD_S: Final = 6 * 24 * 3600.0

Carry = Callable[[Sequence[OutgoingRecord]], None]
"""A function that appends records to the log and waits for Kafka. It raises BackboneUnreachable."""
Known = Callable[[str, Sequence[str]], set[tuple[str, str]]]
"""A function of a session and message ids that returns recipient and id of those that the mailbox table has."""


class Carried(NamedTuple):
    """The number of lines that were carried, and whether more lines wait."""

    lines: int
    more: bool


class _Posting(NamedTuple):
    """A record, and the time when its message was sent, in seconds since 1970 UTC."""

    record: OutgoingRecord
    sent_s: float | None = None


@dataclass
class _Reading:
    """How far a file was read. `lines` are the digests of the lines in order; `more`: there are more lines."""

    end: int
    lines: list[bytes] = field(default_factory=list)
    more: bool = False


class SessionCarrier:
    """One session of the file queue, whose messages are appended to the log (carried).

    Args:
        root: The queue's folder.
        session: The name of the session.
        carry: Appends records to the log and waits until Kafka has acknowledged them.
        known: Given a session and message ids, returns recipient and id of the messages that the mailbox table
            already has, such as `known_messages`.
        stop: Lets carrying end early when it is set.
    """

    def __init__(self, root: str, session: str, carry: Carry, known: Known, stop: threading.Event) -> None:
        self._root = root
        self._session = session
        self._append = carry
        self._known = known
        self._stop = stop

    def consumers(self) -> list[str]:
        """Return the names of the agents that have polled this session, except the bridge itself.

        Raises FileNotFoundError if the session does not exist, and OSError if its folder cannot be read.
        """
        with SessionFolder(self._root, self._session, create=False) as folder:
            return [agent for agent in agents(folder) if agent != CONSUMER and agent not in EVERYBODY]

    def carry_some(self, consumers: Sequence[str]) -> Carried:
        """Append the next messages after the bridge's cursor to the log, and move the cursor over them.

        At most 1000 lines or 8 MiB are read. A message goes to its recipient's mailbox, a broadcast to the
        mailbox of each agent in `consumers`, an invalid line to the stream `refused/file`.

        Raises:
            BackboneUnreachable: Kafka did not acknowledge the records. The cursor stays.
            ViewUnreadable: The mailbox table cannot be read.
            QueueError: Another process has the session's lock for too long (2 s at most).
            OSError: A file cannot be used.
        """
        with self._opened() as (folder, fd, start):
            if fd is None:
                return Carried(0, more=False)
            size, reading = os.fstat(fd).st_size, _Reading(start or 0)
            if reading.end > size:  # the file was cut, and the rest of it was carried
                self._move(folder, fd, start, _Reading(size))
                return Carried(0, more=False)
            self._carry(self._new(folder, fd, size, reading, consumers))
            if reading.lines or start is None:
                self._move(folder, fd, start, reading)
            return Carried(len(reading.lines), reading.more)

    def carry_broadcasts(self, consumers: Sequence[str]) -> bool:
        """Append the broadcasts before the bridge's cursor to the mailboxes of the agents `consumers`.

        Use it for agents that have not got these broadcasts; the cursor does not move. Returns True if all were
        carried, and False if `stop` was set meanwhile. Raises BackboneUnreachable, ViewUnreadable, QueueError
        and OSError as `carry_some` does.
        """
        with self._opened() as (folder, fd, end):
            if fd is None:
                return True
            lines = complete_lines(fd, 0, min(end or 0, os.fstat(fd).st_size))
            self._carry(self._broadcasts(folder, lines, consumers))
        return not self._stop.is_set()

    @contextmanager
    def _opened(self) -> Iterator[tuple[SessionFolder, int | None, int | None]]:
        """Yield the session, the descriptor of its messages, and the bridge's cursor, of the same moment."""
        with SessionFolder(self._root, self._session, create=False) as folder:
            lock_soon(folder, _LOCK_S)
            cursor = _own_cursor(folder)
            fd = folder.open_file(MESSAGES)
            folder.unlock()
            with nullcontext() if fd is None else fd:
                yield folder, fd, cursor

    def _broadcasts(
        self, folder: SessionFolder, lines: Iterable[tuple[int, int, bytes | None]], consumers: Sequence[str]
    ) -> Iterator[_Posting]:
        for _, _, line in lines:
            if self._stop.is_set():
                return
            if line is None or not may_be_to_everybody(line):
                continue
            message = parse_line(line)
            if message is not None and is_to_everybody(message):
                yield from self._postings(folder, line, message, consumers)

    def _new(
        self, folder: SessionFolder, fd: int, size: int, reading: _Reading, consumers: Sequence[str]
    ) -> Iterator[_Posting]:
        start, refused = reading.end, 0
        for _, line_end, line in complete_lines(fd, start, size):
            message = parse_line(line)
            if message is None:
                refused += 1
                yield _Posting(refusal_of(self._session, line or b""))
            else:
                yield from self._postings(folder, line or b"", message, consumers)
            reading.end = line_end
            reading.lines.append(_digest(line))
            if len(reading.lines) == _LINES or reading.end - start > _BYTES or self._stop.is_set():
                reading.more = True
                break
        if refused:
            log.warning("lines_refused", session=self._session, lines=refused, why="no messages of the queue")

    def _carry(self, postings: Iterable[_Posting]) -> None:
        """Append the records in limited memory: a short line may have a long side-file and many recipients."""
        found: list[_Posting] = []
        found_bytes = 0
        for one in postings:
            found.append(one)
            found_bytes += len(one.record.value)
            if len(found) >= _LINES or found_bytes > _BYTES:
                self._carry_found(found)
                found, found_bytes = [], 0
        self._carry_found(found)

    def _carry_found(self, found: Sequence[_Posting]) -> None:
        """Append the records that the log may not have.

        Old messages that the view has are left out: the mailbox has forgotten their ids, and would count them
        as new messages.
        """
        oldest_s = time.time() - _OLD_S
        old = [one.record.ce_id for one in found if one.sent_s is not None and one.sent_s < oldest_s]
        known = self._known(self._session, old) if old else set()
        records = [one.record for one in found]
        wanted = [one for one in records if (one.stream.rpartition("/")[2], one.ce_id) not in known]
        if wanted:
            self._append(wanted)

    def _move(self, folder: SessionFolder, fd: int, start: int | None, reading: _Reading) -> None:
        """Move the cursor over the lines that were read.

        An expire may have replaced the file meanwhile. It has moved the cursor to the place where the reading
        began, and the lines that are left follow it.
        """
        lock_soon(folder, _LOCK_TO_NOTE_S)
        try:
            now = folder.open_file(MESSAGES)
            if now is None:
                return
            with now:
                at = _own_cursor(folder)
                # The file that was read is still open, so no other file can have its inode number.
                if not os.path.samestat(os.fstat(now), os.fstat(fd)):
                    end = _end_of_carried(now, at or 0, reading.lines)
                    if end != (at or 0):
                        write_cursor(folder, CONSUMER, end)
                elif at == start:
                    write_cursor(folder, CONSUMER, reading.end)
        finally:
            folder.unlock()

    def _postings(
        self, folder: SessionFolder, line: bytes, message: dict[str, Any], consumers: Sequence[str]
    ) -> Iterator[_Posting]:
        if CARRIED_MARK in line:  # it comes from a mailbox
            return
        try:
            whole = with_body(folder, message)
            if "_body_error" in whole:  # the reference is not the text that the sender wrote
                raise ValueError(whole["_body_error"])
            for recipient in consumers if is_to_everybody(whole) else (whole["to"],):
                yield _Posting(posting_of(whole, self._session, recipient), sent_at_s(message))
        except ValueError as error:
            log.warning("line_not_carried", session=self._session, msg_id=message["msg_id"], why=str(error))
            yield _Posting(refusal_of(self._session, line))


def _own_cursor(folder: SessionFolder) -> int | None:
    """Return the bridge's cursor. An invalid one counts as none: carrying a line again does no harm."""
    try:
        return read_cursor(folder, CONSUMER)
    except QueueError:
        log.warning("cursor_not_whole", session=folder.path.rpartition("/")[2])
        return None


def _end_of_carried(fd: int, start: int, carried: Sequence[bytes]) -> int:
    """Return the offset of the first line after `start` that is none of the carried lines, in their order."""
    left, end = iter(carried), start
    for _, line_end, line in complete_lines(fd, start, os.fstat(fd).st_size):
        digest = _digest(line)
        if all(one != digest for one in left):
            break
        end = line_end
    return end


def _digest(line: bytes | None) -> bytes:
    return hashlib.blake2b(line or b"", digest_size=16).digest()
