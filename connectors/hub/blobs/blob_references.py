"""An index of the messages that refer to blobs and have no final status, and of the others' ends (DL-26)."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from schemas.fold.settled import AppliedChange
from schemas.streams.mailboxes.message import MessageRow
from schemas.streams.topic.topic_registry import TopicMessageRow

# More blobs than these are not used within the time that one is kept. Beyond it the oldest ends are forgotten.
_ENDS_MOST: Final = 100_000


class Use(NamedTuple):
    """The use of a blob: whether a message without a final status refers to it, and when the last one ended.

    `ended_at` is in microseconds since 1970 UTC; None if no end is known.
    """

    is_used: bool
    ended_at: int | None


class BlobReferences:
    """An index of messages by the blob that they refer to. A message to a topic counts until it is delivered.

    Thread-safe for one thread that calls `changed` and any number of readers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By digest: the keys of the rows that are live.
        self._used: dict[str, dict[str, None]] = {}
        self._ended: dict[str, int] = {}
        # Until `load` has ended: the keys that `changed` brought, because `load` may bring older rows of them.
        self._changed: set[str] | None = set()

    def load(self, rows: Iterable[MessageRow | TopicMessageRow]) -> None:
        """Add the live rows that the live view contains when it is open. Call it once.

        A row that `changed` has already added is newer, so it is kept.
        """
        with self._lock:
            for row in rows:
                if row.blob is not None and self._changed is not None and _key_of(row) not in self._changed:
                    self._add(row.blob, row)
            self._changed = None

    def changed(self, change: AppliedChange) -> str | None:
        """Update the index with a changed row. Return the digest of a blob that no message uses from now on.

        The result is None for all other changes. The live view's thread calls this method.
        """
        row = change.row
        if not isinstance(row, (MessageRow, TopicMessageRow)) or row.blob is None:
            return None
        with self._lock:
            if self._changed is not None:
                self._changed.add(_key_of(row))
            self._add(row.blob, row)
            return None if row.blob in self._used else row.blob

    def use(self, digest: str) -> Use:
        """Return the use of a blob."""
        with self._lock:
            return Use(digest in self._used, self._ended.get(digest))

    def _add(self, digest: str, row: MessageRow | TopicMessageRow) -> None:
        key = _key_of(row)
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


def _key_of(row: MessageRow | TopicMessageRow) -> str:
    return f"{row.VIEW}/{row.key}"
