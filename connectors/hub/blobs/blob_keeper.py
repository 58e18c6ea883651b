"""The service that removes blobs after their last message, and deletes the objects that no blob has (DL-26).

**Reads** the rows of blobs and messages. **Owns** the index of the messages that refer to blobs. **Guarantees**
that a blob stays while a message without a final status refers to it, and for the time `keep_s` of its row
after its upload and after the end of its last message. No record follows a message: each gateway has the index.
A gateway that is behind the end of the log removes nothing.

**On restart** a gateway does not know when ended messages ended, so it keeps all blobs for `keep_s` again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from connectors.hub.blobs.blob_store import BlobStore
from connectors.hub.live.live_view import LiveView
from connectors.hub.live.log_clock import LogClock
from connectors.hub.live.row_lists import RowIndex
from connectors.hub.reactor.timers import Timers
from schemas.effects.following import BY_REACTOR, derived_id
from schemas.fold.settled import AppliedChange
from schemas.streams.blob.blobs import BLOB_REMOVED, REMOVED, STORED, BlobRemoved, BlobRow
from schemas.streams.mailboxes.message import MessageRow
from schemas.streams.topic.topic_registry import TopicMessageRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.ids import BLOB, stream_key

# More blobs than these are not used within the time that one is kept. Beyond it the oldest ends are forgotten.
_ENDS_MOST: Final = 100_000


class Use(NamedTuple):
    """The use of a blob: whether a message without a final status refers to it, and when the last one ended.

    `ended_at` is in microseconds since 1970 UTC; None if no end is known.
    """

    is_used: bool
    ended_at: int | None


class BlobReferences(RowIndex[MessageRow | TopicMessageRow]):
    """An index of messages by the blob that they refer to, those to topics until they are delivered."""

    def __init__(self) -> None:
        super().__init__(MessageRow, TopicMessageRow)
        # By digest: the views and keys of the rows that are live.
        self._used: dict[str, dict[tuple[str, str], None]] = {}
        self._ended: dict[str, int] = {}

    def use(self, digest: str) -> Use:
        """Return the use of a blob."""
        with self._lock:
            return Use(digest in self._used, self._ended.get(digest))

    def _add(self, row: MessageRow | TopicMessageRow) -> None:
        digest, key = row.blob, (row.VIEW, row.key)
        if digest is None:
            return
        if row.is_live:
            self._used.setdefault(digest, {})[key] = None
            return
        used = self._used.get(digest)
        if used is not None:
            used.pop(key, None)
            if not used:
                del self._used[digest]
        ended_at = row.ended_at if isinstance(row, MessageRow) else row.delivered_at
        last = self._ended.pop(digest, 0)
        self._ended[digest] = max(last, ended_at or 0)
        if len(self._ended) > _ENDS_MOST:
            del self._ended[next(iter(self._ended))]


log = structlog.stdlib.get_logger(__name__)

_SECOND_US: Final = 1_000_000
# No message may refer to a blob that ends sooner. In this time a record reaches all gateways.
_MARGIN_S: Final = 300
_CATCH_UP_S: Final = 5.0
_SWEEP_S: Final = 3600.0
ORPHAN_S: Final = 3600.0
"""The age from which an object without a blob, or an unfinished upload, is deleted, in seconds."""


class BlobKeeper(Timers[BlobRow]):
    """The timers of all blobs, and the deletion of objects. For `live_view` and `append` see `Timers`.

    Args:
        live_view: The live view.
        append: Appends a record to the log.
        store: The objects.
        log_clock: The log's clock. None: this process's own.
    """

    thread_name = "blob-keeper"
    row_type = BlobRow
    follows = (BlobRow, MessageRow, TopicMessageRow)

    def __init__(
        self,
        live_view: LiveView,
        append: Callable[[OutgoingRecord], None],
        store: BlobStore,
        log_clock: LogClock | None = None,
    ) -> None:
        super().__init__(live_view, self._append_removal, log_clock)
        self.store = store
        self._append_to_log = append
        self._references = BlobReferences()
        self._begun_at = self._log_clock.now_us()
        self._removed: deque[str] = deque()
        self._sweep_at = time.monotonic() + _SWEEP_S

    def open(self) -> None:
        """Read all live rows and start the thread. Call it once, when the live view is open."""
        self._references.load([*self._live_view.live(MessageRow), *self._live_view.live(TopicMessageRow)])
        super().open()

    def registered(self, job_id: str) -> None:
        """Do nothing: a new job has no blobs."""

    def on_change(self, change: AppliedChange) -> None:
        """Follow the changes of blobs and of messages. The live view calls it on its thread."""
        super().on_change(change)
        row = change.row
        if isinstance(row, BlobRow) and row.status == REMOVED:
            self._removed.append(row.object)
            self._wake.set()
            return
        if not isinstance(row, (MessageRow, TopicMessageRow)) or row.blob is None:
            return
        self._references.changed(change)
        if not self._references.use(row.blob).is_used:
            blob = self._live_view.get(BlobRow, row.blob)
            if blob is not None:
                self._note(blob.key, blob)

    def stream_of(self, row: BlobRow) -> str:
        """Return the blob's stream."""
        return stream_key(BLOB, row.digest)

    def moment_of(self, row: BlobRow) -> int | None:
        """Return when a blob ends, in microseconds since 1970 UTC; None while a message refers to it."""
        use = self._references.use(row.digest)
        if row.status != STORED or use.is_used:
            return None
        last = max(self._begun_at, use.ended_at or 0)
        return max(row.keep_until, last + row.keep_s * _SECOND_US)

    def record_of(self, row: BlobRow, now_us: int) -> OutgoingRecord:
        """Return the record that removes the blob."""
        cause = f"{row.key}/{row.object}/{row.keep_until}"
        body = BlobRemoved(digest=row.digest, object=row.object)
        return body.record(ce_id=derived_id(cause, BLOB_REMOVED), **BY_REACTOR)

    def is_usable(self, row: BlobRow) -> bool:
        """Return whether a new message may refer to a blob: it is stored, and does not end soon."""
        if row.status != STORED:
            return False
        if self._references.use(row.digest).is_used:
            return True
        margin_us = min(_MARGIN_S * _SECOND_US, row.keep_s * _SECOND_US // 2)
        moment = self.moment_of(row)
        return moment is not None and moment - self._log_clock.now_us() > margin_us

    def _append_removal(self, record: OutgoingRecord) -> None:
        """Append the removal of a blob if no message refers to it at the end of the log."""
        try:
            self._live_view.catch_up(_CATCH_UP_S)
        except BackboneUnreachable as error:
            log.warning("blob_not_removed", stream=record.stream, why=str(error))
            return
        row = self._live_view.get(BlobRow, record.stream.partition("/")[2])
        now_us = self._log_clock.now_us(record.stream)
        moment = None if row is None else self.moment_of(row)
        if row is not None and moment is not None and moment <= now_us:
            self._append_to_log(self.record_of(row, now_us))

    def _look(self) -> bool:
        self._delete_removed()
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_S
            self.sweep(ORPHAN_S)
        return super()._look()

    def _delete_removed(self) -> None:
        """Delete the objects of blobs that were removed. The sweep deletes those that cannot be deleted now."""
        while self._removed and not self._closing.is_set():
            name = self._removed.popleft()
            try:
                self.store.delete(name)
            except OSError as error:
                log.warning("object_not_deleted", object=name, why=str(error))

    def sweep(self, age_s: float) -> None:
        """Delete the objects that no blob has, and unfinished uploads, if they are older than `age_s` seconds.

        Such an object is what is left of an upload whose record never came, or of a deletion that was
        interrupted. A record that is under way is in the log before its object is so old.
        """
        try:
            self.store.delete_drafts(age_s)
            known = {row.object for row in self._live_view.live(BlobRow)}
            names = self.store.strangers(age_s, known.__contains__)
            if not names:
                return
            self._live_view.catch_up(_CATCH_UP_S)
            known = {row.object for row in self._live_view.live(BlobRow)}
            for name in names:
                if name not in known and not self._closing.is_set():
                    self.store.delete(name)
                    log.info("orphan_deleted", object=name)
        except (OSError, BackboneUnreachable) as error:
            log.warning("blobs_not_swept", why=str(error))
