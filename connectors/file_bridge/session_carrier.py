"""Carries one session's lines into the mailboxes (FQ-15): each line once, to each of its recipients.

**Reads** the session's messages from the bridge's own cursor on; it is a consumer with a cursor like any other,
so `expire` moves it along. **Owns** that cursor.
**Guarantees** that the cursor moves only over lines that Kafka has. Killed before that, it carries them again
under the same ids, and they settle as duplicates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import structlog

from connectors.file_bridge.records import (
    is_to_everybody,
    posting_of,
    recipients_of,
    refusal_of,
    sent_at_s,
)
from connectors.file_queue.cursors import agents, read_cursor, write_cursor
from connectors.file_queue.message_queue import lock_session, with_body
from connectors.file_queue.message_record import CARRIED_MARK, parse_line
from connectors.file_queue.session_files import MESSAGES, SessionFolder, complete_lines
from schemas.record import OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

# The bridge's own name among the consumers.
CONSUMER: Final = "trunkline-bridge"
# What is carried before the cursor moves.
_LINES: Final = 1000
_BYTES: Final = 8 * 1024 * 1024

# Mailboxes know ids for a week of the log's time; a line says when it was sent by its sender's clock.
_OLD_S: Final = 6 * 24 * 3600.0

Carry = Callable[[Sequence[OutgoingRecord]], None]
"""Appends records and waits for Kafka; raises BackboneUnreachable."""
Known = Callable[[str, Sequence[str]], set[tuple[str, str]]]
"""Those of a session's message ids that the mailbox view has, with their recipients; raises TrunklineError."""


class _Posting(NamedTuple):
    """A record, and for a message when it was sent, in seconds since 1970 UTC."""

    record: OutgoingRecord
    sent_s: float | None = None


class SessionCarrier:
    """One session of the queue at `root`. `known` says which old messages are in the mailbox view already."""

    def __init__(self, root: str, session: str, carry: Carry, known: Known) -> None:
        self._root = root
        self._session = session
        self._append = carry
        self._known = known

    def consumers(self) -> list[str]:
        """The agents that have read from this session's files."""
        with SessionFolder(self._root, self._session, create=False) as folder:
            return [agent for agent in agents(folder) if agent != CONSUMER]

    def carry_new(self, consumers: Sequence[str]) -> int:
        """Carry what lies behind the cursor; returns how many lines. Raises BackboneUnreachable, QueueError."""
        carried = 0
        while lines := self._carry_some(consumers):
            carried += lines
        return carried

    def carry_broadcasts(self, consumers: Sequence[str]) -> None:
        """Carry what was sent to everybody before, for consumers that have come since."""
        with SessionFolder(self._root, self._session, create=False) as folder:
            lock_session(folder)
            end = read_cursor(folder, CONSUMER) or 0
            fd = folder.open_file(MESSAGES)
            folder.unlock()
            if fd is None:
                return
            try:
                found: list[_Posting] = []
                for _, _, line in complete_lines(fd, 0, min(end, os.fstat(fd).st_size)):
                    found += self._postings(folder, line, consumers, broadcasts_alone=True)
                    if len(found) >= _LINES:
                        self._carry(found)
                        found = []
                self._carry(found)
            finally:
                os.close(fd)

    def _carry_some(self, consumers: Sequence[str]) -> int:
        with SessionFolder(self._root, self._session, create=False) as folder:
            lock_session(folder)
            start = read_cursor(folder, CONSUMER)
            fd = folder.open_file(MESSAGES)
            folder.unlock()
            if fd is None:
                return 0
            try:
                return self._carry_from(folder, fd, start, consumers)
            finally:
                os.close(fd)

    def _carry_from(self, folder: SessionFolder, fd: int, start: int | None, consumers: Sequence[str]) -> int:
        size, end, lines = os.fstat(fd).st_size, start or 0, 0
        if end > size:  # it was cut; what is left of it was carried
            self._move(folder, fd, start, size)
            return 0
        found: list[_Posting] = []
        for _, line_end, line in complete_lines(fd, end, size):
            found += self._postings(folder, line, consumers)
            end, lines = line_end, lines + 1
            if lines == _LINES or end - (start or 0) > _BYTES:
                break
        self._carry(found)
        if lines or start is None:
            self._move(folder, fd, start, end)
        return lines

    def _carry(self, found: Sequence[_Posting]) -> None:
        """Append what the log may not have yet: old messages that the view has are forgotten in the mailbox,
        and would count as new ones.
        """
        oldest_s = time.time() - _OLD_S
        old = [one.record.ce_id for one in found if one.sent_s is not None and one.sent_s < oldest_s]
        known = self._known(self._session, old) if old else set()
        wanted = [one.record for one in found if (_recipient_of(one.record), one.record.ce_id) not in known]
        if wanted:
            self._append(wanted)

    def _move(self, folder: SessionFolder, fd: int, start: int | None, end: int) -> None:
        """Move the cursor, unless an expire has made a new file of the one that was read: then it has moved the
        cursor to where the reading began, and the lines are carried again.
        """
        lock_session(folder)
        try:
            now = folder.open_file(MESSAGES)
            if now is None:
                return
            # The file that was read is still open, so no other can have its number.
            is_same = os.path.samestat(os.fstat(now), os.fstat(fd))
            os.close(now)
            if is_same and read_cursor(folder, CONSUMER) == start:
                write_cursor(folder, CONSUMER, end)
        finally:
            folder.unlock()

    def _postings(
        self,
        folder: SessionFolder,
        line: bytes | None,
        consumers: Sequence[str],
        *,
        broadcasts_alone: bool = False,
    ) -> Iterator[_Posting]:
        message = parse_line(line)
        if message is None:
            if not broadcasts_alone:
                yield _Posting(refusal_of(self._session, line or b""))
            return
        if line is not None and CARRIED_MARK in line:  # it came from the mailbox
            return
        if broadcasts_alone and not is_to_everybody(message):
            return
        try:
            whole = with_body(folder, message)
            for recipient in recipients_of(whole, consumers):
                yield _Posting(posting_of(whole, self._session, recipient), sent_at_s(message))
        except ValueError:
            log.warning("line_not_carried", session=self._session, msg_id=message["msg_id"])
            yield _Posting(refusal_of(self._session, line or b""))


def _recipient_of(record: OutgoingRecord) -> str:
    return record.stream.rpartition("/")[2]
