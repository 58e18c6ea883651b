"""Carries one session's lines into the mailboxes (FQ-15): each line once, to each of its recipients.

**Reads** the session's messages from the bridge's own cursor on; it is a consumer with a cursor like any other,
so `expire` moves it along. **Owns** that cursor.
**Guarantees** that the cursor moves only over lines that Kafka has. Killed before that, it carries them again
under the same ids, and they settle as duplicates.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from connectors.file_bridge.records import (
    is_to_everybody,
    may_be_to_everybody,
    posting_of,
    recipients_of,
    refusal_of,
    sent_at_s,
)
from connectors.file_bridge.session_lock import lock_soon
from connectors.file_queue.cursors import agents, read_cursor, write_cursor
from connectors.file_queue.message_queue import with_body
from connectors.file_queue.message_record import CARRIED_MARK, EVERYBODY, parse_line
from connectors.file_queue.queue_errors import QueueError
from connectors.file_queue.session_files import MESSAGES, SessionFolder, complete_lines
from schemas.wire.record import OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

# The bridge's own name among the consumers.
CONSUMER: Final = "trunkline-bridge"
# What is carried before the cursor moves, and what is held at once.
_LINES: Final = 1000
_BYTES: Final = 8 * 1024 * 1024

# How long a session's lock is waited for; longer when the work is done and only to be noted.
_LOCK_S: Final = 0.25
_LOCK_TO_NOTE_S: Final = 2.0

# Mailboxes know ids for a week of the log's time; a line says when it was sent by its sender's clock.
_OLD_S: Final = 6 * 24 * 3600.0

Carry = Callable[[Sequence[OutgoingRecord]], None]
"""Appends records and waits for Kafka; raises BackboneUnreachable."""
Known = Callable[[str, Sequence[str]], set[tuple[str, str]]]
"""Those of a session's message ids that the mailbox view has, with their recipients; raises ViewUnreadable."""


class Carried(NamedTuple):
    """How many lines were carried, and whether there were more."""

    lines: int
    more: bool


class _Posting(NamedTuple):
    """A record, and for a message when it was sent, in seconds since 1970 UTC."""

    record: OutgoingRecord
    sent_s: float | None = None


@dataclass
class _Reading:
    """How far a file was read. `lines`: the digests of the lines, in their order; `more`: it was not all."""

    end: int
    lines: list[bytes] = field(default_factory=list)
    more: bool = False


class SessionCarrier:
    """One session of the queue at `root`. `known` says which old messages are in the mailbox view already;
    once `stop` is set, what is under way is left where it is.
    """

    def __init__(self, root: str, session: str, carry: Carry, known: Known, stop: threading.Event) -> None:
        self._root = root
        self._session = session
        self._append = carry
        self._known = known
        self._stop = stop

    def consumers(self) -> list[str]:
        """The agents that have read from this session's files and can be written to by name."""
        with SessionFolder(self._root, self._session, create=False) as folder:
            return [agent for agent in agents(folder) if agent != CONSUMER and agent not in EVERYBODY]

    def carry_some(self, consumers: Sequence[str]) -> Carried:
        """Carry some of what lies behind the cursor. Raises BackboneUnreachable, ViewUnreadable, QueueError,
        OSError.
        """
        with SessionFolder(self._root, self._session, create=False) as folder:
            lock_soon(folder, _LOCK_S)
            start = _own_cursor(folder)
            fd = folder.open_file(MESSAGES)
            folder.unlock()
            if fd is None:
                return Carried(0, more=False)
            try:
                return self._carry_from(folder, fd, start, consumers)
            finally:
                os.close(fd)

    def carry_broadcasts(self, consumers: Sequence[str]) -> bool:
        """Carry what was sent to everybody before, for consumers that have come since. False: it was stopped.

        Raises as `carry_some`.
        """
        with SessionFolder(self._root, self._session, create=False) as folder:
            lock_soon(folder, _LOCK_S)
            end = _own_cursor(folder) or 0
            fd = folder.open_file(MESSAGES)
            folder.unlock()
            if fd is None:
                return True
            try:
                lines = complete_lines(fd, 0, min(end, os.fstat(fd).st_size))
                self._carry(self._broadcasts(folder, lines, consumers))
            finally:
                os.close(fd)
        return not self._stop.is_set()

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

    def _carry_from(
        self, folder: SessionFolder, fd: int, start: int | None, consumers: Sequence[str]
    ) -> Carried:
        size, reading = os.fstat(fd).st_size, _Reading(start or 0)
        if reading.end > size:  # it was cut; what is left of it was carried
            self._move(folder, fd, start, _Reading(size))
            return Carried(0, more=False)
        self._carry(self._new(folder, fd, size, reading, consumers))
        if reading.lines or start is None:
            self._move(folder, fd, start, reading)
        return Carried(len(reading.lines), reading.more)

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
        """Append them, never holding more than a few at once: a short line may have a long side-file, and go
        to many.
        """
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
        """Append what the log may not have yet: old messages that the view has are forgotten in the mailbox,
        and would count as new ones.
        """
        oldest_s = time.time() - _OLD_S
        old = [one.record.ce_id for one in found if one.sent_s is not None and one.sent_s < oldest_s]
        known = self._known(self._session, old) if old else set()
        wanted = [one.record for one in found if (_recipient_of(one.record), one.record.ce_id) not in known]
        if wanted:
            self._append(wanted)

    def _move(self, folder: SessionFolder, fd: int, start: int | None, reading: _Reading) -> None:
        """Move the cursor over what was read. If an expire has made a new file of the one that was read, it has
        moved the cursor to where the reading began, and what is left of the lines lies behind it.
        """
        lock_soon(folder, _LOCK_TO_NOTE_S)
        try:
            now = folder.open_file(MESSAGES)
            if now is None:
                return
            try:
                at = _own_cursor(folder)
                # The file that was read is still open, so no other can have its number.
                if not os.path.samestat(os.fstat(now), os.fstat(fd)):
                    end = _end_of_carried(now, at or 0, reading.lines)
                    if end != (at or 0):
                        write_cursor(folder, CONSUMER, end)
                elif at == start:
                    write_cursor(folder, CONSUMER, reading.end)
            finally:
                os.close(now)
        finally:
            folder.unlock()

    def _postings(
        self, folder: SessionFolder, line: bytes, message: dict[str, Any], consumers: Sequence[str]
    ) -> Iterator[_Posting]:
        if CARRIED_MARK in line:  # it came from the mailbox
            return
        try:
            whole = with_body(folder, message)
            if "_body_error" in whole:  # the reference is not what its sender said
                raise ValueError(whole["_body_error"])
            for recipient in recipients_of(whole, consumers):
                yield _Posting(posting_of(whole, self._session, recipient), sent_at_s(message))
        except ValueError as error:
            log.warning("line_not_carried", session=self._session, msg_id=message["msg_id"], why=str(error))
            yield _Posting(refusal_of(self._session, line))


def _own_cursor(folder: SessionFolder) -> int | None:
    """The bridge's cursor. One that is not whole counts as none: to carry a line again does no harm."""
    try:
        return read_cursor(folder, CONSUMER)
    except QueueError:
        log.warning("cursor_not_whole", session=folder.path.rpartition("/")[2])
        return None


def _end_of_carried(fd: int, start: int, carried: Sequence[bytes]) -> int:
    """Where, from `start` on, the first line begins that is none of the carried ones, in their order."""
    left, end = iter(carried), start
    for _, line_end, line in complete_lines(fd, start, os.fstat(fd).st_size):
        digest = _digest(line)
        if all(one != digest for one in left):
            break
        end = line_end
    return end


def _digest(line: bytes | None) -> bytes:
    return hashlib.blake2b(line or b"", digest_size=16).digest()


def _recipient_of(record: OutgoingRecord) -> str:
    return record.stream.rpartition("/")[2]
