"""The carrying of one session of the file queue to mailboxes (FQ-15): each line once, to each recipient.

**Reads** the session's messages from the bridge's own cursor on. The bridge is a consumer like any other, so an
expire adjusts its cursor. **Owns** that cursor.
**Guarantees** that the cursor moves only over lines that Kafka has, or whose recipients are held: their mailbox
is full, or the sender is above its rate. A bridge that is killed before that carries the lines again under the
same ids, and they settle as duplicates.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import structlog

from connectors.doors.file_bridge.held_lines import (
    CONSUMER,
    PREFIX,
    Carried,
    Consumed,
    Posting,
    Reading,
    Refused,
    held_cursors,
    held_recipients,
    hold,
    move_held,
    own_cursor,
    places_of,
)
from connectors.doors.file_bridge.posting_rules import BridgeRules, GatewayBlobs, NotUploaded, body_in
from connectors.doors.file_bridge.queue_folder import lock_soon
from connectors.doors.file_bridge.records import (
    is_to_everybody,
    may_be_to_everybody,
    posting_of,
    refusal_of,
    sent_at_s,
)
from schemas.wire.record import OutgoingRecord
from trunkline_agent.queue.cursors import agents, write_cursor
from trunkline_agent.queue.message_record import CARRIED_MARK, EVERYBODY, is_utf16, parse_line, why_refused
from trunkline_agent.queue.queue_errors import QueueError
from trunkline_agent.queue.session_files import MESSAGES, SessionFolder, complete_lines
from trunkline_agent.wire.verdicts import MAILBOX_FULL

log = structlog.stdlib.get_logger(__name__)

# How much is carried before the cursor moves, and kept in memory at once.
_LINES: Final = 1000
_BYTES: Final = 8 * 1024 * 1024
# How long to wait for a session's lock. Longer after the lines were carried, when only the cursor has to move.
_LOCK_S: Final = 0.25
_LOCK_TO_NOTE_S: Final = 2.0
# Mailboxes remember ids for a week of the log's time. The time in a line is by its sender's clock.
_OLD_S: Final = 6 * 24 * 3600.0

Carry = Callable[[Sequence[OutgoingRecord]], Sequence[str | None]]
"""A function that appends records to the log and waits for Kafka. It raises BackboneUnreachable.

It returns for each record the reason why its mailbox has not taken it at present, such as `mailbox_full`, or
None if the record needs no further attempt.
"""
Known = Callable[[str, Sequence[str]], set[tuple[str, str]]]
"""A function of a session and message ids that returns recipient and id of those that the mailbox table has."""


class SessionCarrier:
    """One session of the file queue, whose messages are appended to the log (carried).

    Args:
        root: The queue's folder.
        session: The name of the session.
        carry: Appends records to the log and waits until Kafka has acknowledged them.
        known: Given a session and message ids, returns recipient and id of the messages that the mailbox table
            already has, such as `known_messages`.
        stop: Lets carrying end early when it is set.
        rules: The limits of mailboxes and senders.
        blobs: Stores bodies that are too long for a record.
    """

    def __init__(
        self,
        root: str,
        session: str,
        carry: Carry,
        known: Known,
        stop: threading.Event,
        rules: BridgeRules,
        blobs: GatewayBlobs,
    ) -> None:
        self._root = root
        self._session = session
        self._append = carry
        self._known = known
        self._stop = stop
        self._rules = rules
        self._blobs = blobs

    def consumers(self) -> Consumed:
        """Return the agents that have polled this session, except the bridge itself, and the held recipients.

        Raises FileNotFoundError if the session does not exist, and OSError if its folder cannot be read.
        """
        with SessionFolder(self._root, self._session, create=False) as folder:
            names = agents(folder)
        own = (CONSUMER, *EVERYBODY)
        return Consumed(
            [name for name in names if name not in own and not name.startswith(PREFIX)], held_recipients(names)
        )

    def carry_some(self, consumers: Sequence[str]) -> Carried:
        """Append the next messages after the bridge's cursor to the log, and move the cursor over them.

        At most 1000 lines or 8 MiB are read. A message goes to its recipient's mailbox, a broadcast to the
        mailbox of each agent in `consumers`, an invalid line to the stream `refused/file`. A recipient whose
        mailbox takes no more is held: its later lines are left to `carry_held`.

        Raises:
            BackboneUnreachable: Kafka did not acknowledge the records. The cursor stays.
            ViewUnreadable: The mailbox table cannot be read.
            QueueError: Another process has the session's lock for too long (2 s at most).
            OSError: A file cannot be used.
        """
        with self._opened() as (folder, fd, start, held):
            if fd is None:
                return Carried(0, more=False, held={})
            size, reading = os.fstat(fd).st_size, Reading(start or 0)
            if reading.end > size:  # the file was cut, and the rest of it was carried
                self._move(folder, fd, start, Reading(size), {})
                return Carried(0, more=False, held={})
            refused = Refused(held)
            self._carry(self._new(folder, fd, size, reading, consumers, refused), refused)
            if reading.lines or start is None:
                self._move(folder, fd, start, reading, refused.new)
            return Carried(len(reading.lines), reading.more, refused.reasons())

    def carry_held(self, recipient: str, consumers: Sequence[str], most: int) -> Carried:
        """Append the lines that a held recipient lacks to the log, up to the bridge's cursor.

        If nothing is left then, the recipient is not held any more.

        Args:
            recipient: The recipient. Nothing is done if it is not held.
            consumers: The agents that get broadcasts.
            most: The largest number of lines to append.

        Returns:
            The number of appended lines; whether the recipient is still held, without a new refusal; and the
            reason of such a refusal.

        Raises:
            BackboneUnreachable, ViewUnreadable, QueueError, OSError: As `carry_some` does.
        """
        with self._opened() as (folder, fd, cursor, held):
            if fd is None or recipient not in held:
                return Carried(0, more=False, held={})
            end = min(cursor or 0, os.fstat(fd).st_size)
            reading, refused = Reading(min(held[recipient], end)), Refused({})
            is_consumer, mine = recipient in consumers, list[tuple[int, str]]()

            def postings() -> Iterator[Posting]:
                for start, line_end, line in complete_lines(fd, reading.end, end):
                    message = parse_line(line)
                    if message is not None and (
                        message["to"] == recipient or (is_consumer and is_to_everybody(message))
                    ):
                        yield from self._postings(folder, start, line or b"", message, [recipient], refused)
                        mine.append((start, message["msg_id"]))
                    reading.add(start, line_end, line)
                    if len(mine) >= most or len(reading.lines) == _LINES or refused.new or self._stop.is_set():
                        return

            self._carry(postings(), refused)
            where, why = refused.new.get(recipient, (reading.end, None))
            index = bisect_left(reading.starts, where)
            is_done = self._move_held(folder, fd, recipient, reading, index, end)
            ids = [one for start, one in mine if start < where]
            return Carried(len(ids), not is_done and why is None, refused.reasons(), ids)

    def _move_held(
        self, folder: SessionFolder, fd: int, recipient: str, reading: Reading, index: int, end: int
    ) -> bool:
        """Move the place of a held recipient to a line that was read. Return whether it is held no more."""
        lock_soon(folder, _LOCK_TO_NOTE_S)
        try:
            now = folder.open_file(MESSAGES)
            if now is None:
                move_held(folder, recipient, None)
                return True
            with now:
                if os.path.samestat(os.fstat(now), os.fstat(fd)):
                    place = reading.places[index]
                else:
                    at, end = held_cursors(folder).get(recipient, 0), own_cursor(folder) or 0
                    place = places_of(now, at, os.fstat(now).st_size, reading.lines)[index]
            is_done = index == len(reading.lines) and place >= end
            move_held(folder, recipient, None if is_done else place)
            return is_done
        finally:
            folder.unlock()

    def carry_broadcasts(self, consumers: Sequence[str]) -> bool:
        """Append the broadcasts before the bridge's cursor to the mailboxes of the agents `consumers`.

        Use it for agents that have not got these broadcasts; the cursor does not move. Returns True if all were
        carried, and False if `stop` was set meanwhile. Raises BackboneUnreachable, ViewUnreadable, QueueError
        and OSError as `carry_some` does.
        """
        with self._opened() as (folder, fd, end, held):
            if fd is None:
                return True
            lines = complete_lines(fd, 0, min(end or 0, os.fstat(fd).st_size))
            refused = Refused(held)
            self._carry(self._broadcasts(folder, lines, consumers, refused), refused)
            if refused.new:
                self._hold_unmoved(folder, fd, refused.new)
        return not self._stop.is_set()

    def _hold_unmoved(self, folder: SessionFolder, fd: int, refused: dict[str, tuple[int, str]]) -> None:
        """Hold recipients at places in a file. Raises QueueError if an expire has replaced it meanwhile."""
        lock_soon(folder, _LOCK_TO_NOTE_S)
        try:
            now = folder.open_file(MESSAGES)
            with nullcontext() if now is None else now:
                if now is None or not os.path.samestat(os.fstat(now), os.fstat(fd)):
                    raise QueueError("an expire replaced its messages while they were carried")
            for recipient, (at, _) in refused.items():
                hold(folder, recipient, at)
        finally:
            folder.unlock()

    @contextmanager
    def _opened(self) -> Iterator[tuple[SessionFolder, int | None, int | None, dict[str, int]]]:
        """Yield the session, the descriptor of its messages, the bridge's cursor, and held recipients' places.

        All are of the same moment.
        """
        with SessionFolder(self._root, self._session, create=False) as folder:
            lock_soon(folder, _LOCK_S)
            cursor, held = own_cursor(folder), held_cursors(folder)
            fd = folder.open_file(MESSAGES)
            folder.unlock()
            with nullcontext() if fd is None else fd:
                yield folder, fd, cursor, held

    def _broadcasts(
        self,
        folder: SessionFolder,
        lines: Iterable[tuple[int, int, bytes | None]],
        consumers: Sequence[str],
        refused: Refused,
    ) -> Iterator[Posting]:
        for start, _, line in lines:
            if self._stop.is_set():
                return
            if line is None or not may_be_to_everybody(line):
                continue
            message = parse_line(line)
            if message is not None and is_to_everybody(message):
                yield from self._postings(folder, start, line, message, consumers, refused)

    def _new(
        self,
        folder: SessionFolder,
        fd: int,
        size: int,
        reading: Reading,
        consumers: Sequence[str],
        refused: Refused,
    ) -> Iterator[Posting]:
        begin, invalid, blob_bytes = reading.end, list[bool](), 0
        for start, line_end, line in complete_lines(fd, begin, size):
            message = parse_line(line)
            if message is None:
                invalid.append(is_utf16(line))
                yield Posting(refusal_of(self._session, line or b""), start)
            else:
                for one in self._postings(folder, start, line or b"", message, consumers, refused):
                    blob_bytes += one.blob_bytes
                    yield one
            reading.add(start, line_end, line)
            if len(reading.lines) == _LINES or reading.end - begin + blob_bytes > _BYTES or self._stop.is_set():
                reading.more = True
                break
        if invalid:
            log.warning("lines_refused", session=self._session, lines=len(invalid), why=why_refused(invalid))

    def _carry(self, postings: Iterable[Posting], refused: Refused) -> None:
        """Append the records in limited memory: a short line may have a long side-file and many recipients."""
        found: list[Posting] = []
        found_bytes = 0
        for one in postings:
            found.append(one)
            # With those of blobs, so that their messages follow soon.
            found_bytes += len(one.record.value) + one.blob_bytes
            if len(found) >= _LINES or found_bytes > _BYTES:
                self._carry_found(found, refused)
                found, found_bytes = [], 0
        self._carry_found(found, refused)

    def _carry_found(self, found: Sequence[Posting], refused: Refused) -> None:
        """Append the records that the log may not have.

        Old messages that the view has are left out: the mailbox has forgotten their ids, and would count them
        as new messages.
        """
        oldest_s = time.time() - _OLD_S
        old = [one.record.ce_id for one in found if one.sent_s is not None and one.sent_s < oldest_s]
        known = self._known(self._session, old) if old else set()
        wanted = [one for one in found if (one.recipient, one.record.ce_id) not in known]
        if not wanted:
            return
        answers = self._append([one.record for one in wanted])
        for one, why in zip(wanted, answers, strict=True):
            if why is not None and one.recipient is not None:
                if one.is_hopeless and why == MAILBOX_FULL:  # other lines would wait behind it for ever
                    log.warning("line_not_carried", session=self._session, msg_id=one.record.ce_id, why=why)
                else:
                    refused.add(one.recipient, one.at, why)

    def _move(
        self,
        folder: SessionFolder,
        fd: int,
        start: int | None,
        reading: Reading,
        refused: dict[str, tuple[int, str]],
    ) -> None:
        """Hold the recipients in `refused`, then move the cursor over the lines that were read.

        An expire may have replaced the file meanwhile. It has moved the cursor to the place where the reading
        began, and the lines that are left follow it.
        """
        lock_soon(folder, _LOCK_TO_NOTE_S)
        try:
            now = folder.open_file(MESSAGES)
            if now is None:
                return
            with now:
                at = own_cursor(folder)
                # The file that was read is still open, so no other file can have its inode number.
                is_same = os.path.samestat(os.fstat(now), os.fstat(fd))
                places = reading.places
                if not is_same:
                    places = places_of(now, at or 0, os.fstat(now).st_size, reading.lines)
                for recipient, (line_at, _) in refused.items():
                    hold(folder, recipient, places[bisect_left(reading.starts, line_at)])
                if at == start if is_same else places[-1] != (at or 0):
                    write_cursor(folder, CONSUMER, places[-1])
        finally:
            folder.unlock()

    def _postings(
        self,
        folder: SessionFolder,
        at: int,
        line: bytes,
        message: dict[str, Any],
        consumers: Sequence[str],
        refused: Refused,
    ) -> Iterator[Posting]:
        if CARRIED_MARK in line:  # it comes from a mailbox
            return
        recipients = consumers if is_to_everybody(message) else (message["to"],)
        recipients = [recipient for recipient in recipients if not refused.lacks(recipient, at)]
        if not recipients:
            return
        try:
            body = body_in(folder, message, self._blobs)
            for recipient in recipients:
                if body.blob is not None and not self._rules.takes_blobs(self._session, recipient):
                    raise ValueError("a listener of the XML pump gets no blobs")
                limits = self._rules.limits(recipient)
                record = posting_of({**message, "body": body.text}, self._session, recipient, limits, body.blob)
                why = self._rules.refusal(self._session, recipient, message["from"], body.size)
                if why is None:
                    bytes_most = limits.get("bytes_most")
                    is_hopeless = bytes_most is not None and body.size > bytes_most
                    yield Posting(record, at, recipient, sent_at_s(message), is_hopeless, body.blob_bytes)
                else:
                    refused.add(recipient, at, why)
        except NotUploaded as error:
            for recipient in recipients:
                refused.add(recipient, at, error.reason)
        except ValueError as error:
            log.warning("line_not_carried", session=self._session, msg_id=message["msg_id"], why=str(error))
            yield Posting(refusal_of(self._session, line), at)
