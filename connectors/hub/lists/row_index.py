"""The base class of the gateway's indexes over rows of the live view, such as that of the pending jobs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic

from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import RowT


class RowIndex(ABC, Generic[RowT]):
    """The base class of an index of the live view's rows of one type.

    Register `changed` with the live view before it opens, and call `load` once it is open. Thread-safe for one
    thread that calls `changed` and any number of readers. A subclass must hold `_lock` when it reads.

    Attributes:
        follows: The type of the rows.
    """

    def __init__(self, row_type: type[RowT]) -> None:
        self.follows = (row_type,)
        self._row_type = row_type
        self._lock = threading.Lock()
        # Until `load` has ended: the keys that `changed` brought, because `load` may bring older rows of them.
        self._changed: set[str] | None = set()

    def load(self, rows: Iterable[RowT]) -> None:
        """Add the rows that the live view contains when it is open. Call it once, after `LiveView.open`.

        A row that `changed` has already added is newer, so it is kept.
        """
        for row in rows:
            with self._lock:
                if self._changed is None or row.key not in self._changed:
                    self._add(row)
        with self._lock:
            self._changed = None

    def changed(self, change: AppliedChange) -> None:
        """Update the index with the changed row that `change` carries. Rows of other types are ignored.

        The live view's thread calls this method for each changed row, also while the view opens.
        """
        if not isinstance(change.row, self._row_type):
            return
        with self._lock:
            if self._changed is not None:
                self._changed.add(change.key)
            self._add(change.row)

    @abstractmethod
    def _add(self, row: RowT) -> None:
        """Add a row, or replace the earlier one with its key. The caller holds `_lock`."""
