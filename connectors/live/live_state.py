"""The state of the live view in memory: the state of all streams, the rows of all views, and the fold.

This module starts no thread and does not use Kafka. The caller applies records one by one, in the order of each
partition.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from connectors.live.settled_feed import SettledRecord
from connectors.log.publisher import Position
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange, Settled
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring
from schemas.streams.control.record_macs import macs_stream
from schemas.streams.fold import settle
from schemas.streams.kinds import VIEWS
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_BODIES, MessageBodyRow, MessageRow
from schemas.wire.ids import parse_stream_key
from schemas.wire.record import Record

_NEVER: Final = -1
_NONE: Final = Entries()
# The tables keep messages in a final status for ever. Here only the newest of them are kept.
FINAL_MESSAGES: Final = 50_000
FINAL_BODIES_CHARACTERS: Final = 64 * 1024 * 1024


class LiveState:
    """The result of the fold so far: each stream's state (its entries), and the rows of all views.

    One thread calls `apply`. Any thread may read.

    Attributes:
        entries_by_stream: The state of each stream, by stream such as `job/0a1b2c3d`.
        applied_beyond: By stream, the offset of the last record that the entries loaded from the tables
            include. It has only streams that are ahead of the offset from which the log is read. `apply` skips
            their records up to this offset.
        rows_by_view: The current rows, by the name of the view and the row's key.
        offsets_by_view: The offset of the record that last changed a row, by the name of the view and the key.
    """

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        # Held while a record changes a stream, so that no reader copies half of a change.
        self._lock = threading.Lock()
        self.entries_by_stream: dict[str, Entries] = {}
        self.applied_beyond: dict[str, int] = {}
        self.rows_by_view: dict[str, dict[str, Row]] = {name: {} for name in VIEWS}
        self.offsets_by_view: dict[str, dict[str, int]] = {name: {} for name in VIEWS}
        # The messages in a final status, oldest first: their keys and the lengths of their bodies.
        self._final: deque[tuple[str, int]] = deque()
        self._final_characters = 0

    def clear(self) -> None:
        """Remove all entries and rows, before the tables are loaded or loaded again."""
        self._final_characters = 0
        for known in (self.entries_by_stream, self.applied_beyond, self._final):
            known.clear()
        for name in VIEWS:
            self.rows_by_view[name].clear()
            self.offsets_by_view[name].clear()

    def note_final(self) -> None:
        """Register the messages with a final status (such as read or expired) that were loaded from the tables.

        Call this once after loading. Later, `apply` removes the oldest of these messages from memory when there
        are too many.
        """
        rows = self.rows_by_view[MAILBOX_VIEW].values()
        final = [
            (row.ended_at, row.key) for row in rows if isinstance(row, MessageRow) and row.ended_at is not None
        ]
        for _, key in sorted(final):
            self._add_final(key)

    def apply(self, record: Record, on_change: Callable[[AppliedChange], None]) -> SettledRecord | None:
        """Settle `record`: run the fold, update entries and rows, and return the record with its verdict.

        Args:
            record: The next record of its partition.
            on_change: Called for each row that the record adds, changes or removes.

        Returns:
            The settled record. None if the state that was loaded from the tables includes the record, so that
            nothing changes.

        Raises:
            MissingKeyError: The record's MAC is under a master key that this process lacks.
        """
        stream = None
        if record.key is not None and parse_stream_key(record.key) is not None:
            stream = record.key.decode("ascii")
        if stream is not None and record.offset <= self.applied_beyond.get(stream, _NEVER):
            return None
        known = None if stream is None else self.entries_by_stream.get(stream)
        entries = Entries() if known is None else known
        of_macs = macs_stream(record.partition)
        macs = entries if stream == of_macs else self.entries_by_stream.get(of_macs, _NONE)
        with self._lock:
            settled = settle(record, entries, self._keyring, macs)
            if entries.take_writes() and stream is not None:
                self.entries_by_stream[stream] = entries
        for change in settled.changes:
            applied = AppliedChange(change.view, change.key, record.offset, change.row)
            if self._change(applied):
                on_change(applied)
        return _shown(record, settled)

    def _change(self, change: AppliedChange) -> bool:
        offsets, rows = self.offsets_by_view[change.view], self.rows_by_view[change.view]
        # A loaded table of rows may be ahead of the table of entries. Then the row in it is newer.
        if change.offset < offsets.get(change.key, _NEVER):
            return False
        offsets[change.key] = change.offset
        if change.row is None:
            rows.pop(change.key, None)
        else:
            rows[change.key] = change.row
            if isinstance(change.row, MessageRow) and change.row.ended_at is not None:
                self._keep_newest(change.key)
        return True

    def _keep_newest(self, final: str) -> None:
        """Forget the messages that reached a final status first, if there are too many."""
        self._add_final(final)
        while len(self._final) > 1 and (
            len(self._final) > FINAL_MESSAGES or self._final_characters > FINAL_BODIES_CHARACTERS
        ):
            oldest, length = self._final.popleft()
            self._final_characters -= length
            row = self.rows_by_view[MAILBOX_VIEW].get(oldest)
            # The id may have been used again since.
            if isinstance(row, MessageRow) and row.ended_at is not None and oldest != final:
                for view in (MAILBOX_VIEW, MESSAGE_BODIES):
                    self.rows_by_view[view].pop(oldest, None)
                    self.offsets_by_view[view].pop(oldest, None)

    def _add_final(self, key: str) -> None:
        body = self.rows_by_view[MESSAGE_BODIES].get(key)
        length = len(body.body) if isinstance(body, MessageBodyRow) else 0
        self._final.append((key, length))
        self._final_characters += length

    def entries(self, stream: str) -> Entries:
        """Return a copy of the state of `stream`; it is empty for an unknown stream."""
        with self._lock:
            known = self.entries_by_stream.get(stream)
            return Entries() if known is None else known.copy()


def _shown(record: Record, settled: Settled) -> SettledRecord:
    envelope = settled.envelope
    return SettledRecord(
        Position(record.partition, record.offset),
        f"{settled.stream_kind}/{settled.stream_id}",
        None if envelope is None else envelope.type,
        None if envelope is None else envelope.ce_id,
        None if envelope is None else f"{envelope.door}/{envelope.principal}",
        settled.verdict,
        settled.reason,
        settled.why,
        settled.late,
        settled.status_after,
        settled.seq,
        record.logged_at_us,
        record.value if settled.shown is None else settled.shown,
    )
