"""Takes messages back whose lease has run out: a companion of the gateway, and the part of the reactor that
follows from time instead of from a record.

**Reads** the rows of the view `mailbox`. **Owns** nothing that lasts.
**Guarantees** that a message which nobody acknowledged in time is unread again (or dead, after its last
attempt) about a second later. Each gateway does it: the id of the record follows from the lease alone, so it
counts once. **On restart** it looks at all rows again.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from connectors.live.live_view import LiveView
from connectors.reactor.follow_ups import DOOR, follow_up_id
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import MAILBOX_VIEW, MessageRow, Row
from schemas.streams.mailboxes.mailbox_requests import reclaim_record
from schemas.streams.principal.principals import REACTOR
from schemas.wire.message import LEASED
from schemas.wire.record import MESSAGE_RECLAIMED, OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

_TICK_S: Final = 0.5
# Kafka's clock decides, and may be behind this one; the record may also be lost on its way.
_AGAIN_US: Final = 5_000_000
_STOP_S: Final = 5.0


class LeaseKeeper:
    """`append` takes a record and may drop it: it is tried again. `clock`: seconds since 1970 UTC."""

    def __init__(
        self,
        live_view: LiveView,
        append: Callable[[OutgoingRecord], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._live_view = live_view
        self._append = append
        self._clock = clock
        self._lock = threading.Lock()
        self._due: list[tuple[int, str]] = []  # when to look, in microseconds since 1970 UTC, and at which row
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def open(self) -> None:
        """Look at what is leased, and from now on at each lease that runs out."""
        for row in self._live_view.rows(MAILBOX_VIEW):
            self._note(row)
        self._thread.start()

    def close(self) -> None:
        """End. What has run out is left to the next gateway."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def on_change(self, change: AppliedChange) -> None:
        """A row has changed; called on the live view's thread."""
        if change.view == MAILBOX_VIEW:
            self._note(change.row)

    def registered(self, job_id: str) -> None:
        """Nothing: jobs are others' affair."""

    def check(self) -> int:
        """Take back what has run out; returns how many records were appended."""
        now_us = int(self._clock() * 1_000_000)
        appended = 0
        while (key := self._next_due(now_us)) is not None:
            row = self._live_view.row(MAILBOX_VIEW, key)
            if not isinstance(row, MessageRow) or row.status != LEASED or row.lease_until is None:
                continue
            if row.lease_until > now_us:  # of a later lease, which has been noted, too
                continue
            self._append(_taken_back(row, key))
            appended += 1
            with self._lock:
                heapq.heappush(self._due, (now_us + _AGAIN_US, key))
        return appended

    def _note(self, row: Row | None) -> None:
        if isinstance(row, MessageRow) and row.status == LEASED and row.lease_until is not None:
            with self._lock:
                heapq.heappush(self._due, (row.lease_until, f"{row.realm}/{row.recipient}/{row.message_id}"))

    def _next_due(self, now_us: int) -> str | None:
        with self._lock:
            if not self._due or self._due[0][0] > now_us:
                return None
            return heapq.heappop(self._due)[1]

    def _run(self) -> None:
        while not self._closed.wait(_TICK_S):
            try:
                self.check()
            except Exception:
                log.exception("leases_not_looked_at")


def _taken_back(row: MessageRow, key: str) -> OutgoingRecord:
    lease = str(row.request_id)
    return reclaim_record(
        row.realm,
        row.recipient,
        row.message_id,
        lease,
        door=DOOR,
        principal=REACTOR,
        ce_id=follow_up_id(lease, f"{MESSAGE_RECLAIMED}/{key}"),
    )
