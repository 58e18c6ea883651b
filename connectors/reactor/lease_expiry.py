"""The lease expiry monitor: makes messages whose lease has expired available to readers again.

**Reads** the rows of the view `mailbox`. **Owns** no lasting state.
**Guarantees** that a message which was not acknowledged in time becomes unread again about a second later, or
dead after its last attempt. Every gateway runs a monitor. The id of the record follows from the lease alone, so
the fold counts it once. **On restart** the monitor looks at all rows again.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from connectors.background.background_service import ThreadedService
from connectors.live.live_view import LiveView
from connectors.reactor.derived_records import BY_REACTOR, derived_id
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_RECLAIMED
from schemas.streams.mailboxes.mailbox_requests import reclaim_record
from schemas.streams.mailboxes.message import LEASED, MessageRow
from schemas.wire.record import OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

_TICK_S: Final = 0.5
# Kafka's clock decides, and it may be a little behind this one.
_MARGIN_US: Final = 100_000
# The record may be lost on its way, or Kafka's clock be far behind.
_AGAIN_US: Final = 5_000_000
_STOP_S: Final = 5.0


class LeaseExpiryMonitor(ThreadedService):
    """A background thread of the gateway that appends a record for each message whose lease has expired.

    The record makes the message unread again, or dead after its last attempt. `close` stops the thread.

    Args:
        live_view: The live view, whose rows say which messages are leased and until when.
        append: Appends a record to the log, without waiting for Kafka's acknowledgement. As long as the message
            stays leased, the monitor appends the same record again every five seconds.
    """

    def __init__(self, live_view: LiveView, append: Callable[[OutgoingRecord], None]) -> None:
        super().__init__("lease-expiry", _STOP_S)
        self._live_view = live_view
        self._append = append
        self._lock = threading.Lock()
        # When to look, in microseconds since 1970 UTC, and the key of the row.
        self._due: list[tuple[int, str]] = []

    def open(self) -> None:
        """Read all current leases from the live view and start the thread.

        Call it once, when the live view is open.
        """
        for row in self._live_view.live(MessageRow):
            self._note(row)
        super().open()

    def on_change(self, change: AppliedChange) -> None:
        """Remember when the lease expires, if the changed row is a leased message; ignore any other change.

        Register this method with `LiveView.on_change`. The live view calls it on its own thread.
        """
        self._note(change.row)

    def _take_back(self) -> None:
        """Take back the messages whose lease has expired."""
        now_us = int(time.time() * 1_000_000)
        while (key := self._next_due(now_us)) is not None:
            row = self._live_view.get(MessageRow, key)
            if row is None or row.status != LEASED or row.lease_until is None:
                continue
            if row.lease_until > now_us:  # a later lease, which is also in the heap
                continue
            lease, what = str(row.request_id), (row.realm, row.recipient, row.message_id)
            ce_id = derived_id(lease, f"{MESSAGE_RECLAIMED}/{key}")
            self._append(reclaim_record(*what, lease, ce_id=ce_id, **BY_REACTOR))
            with self._lock:
                heapq.heappush(self._due, (now_us + _AGAIN_US, key))

    def _note(self, row: Row | None) -> None:
        if isinstance(row, MessageRow) and row.status == LEASED and row.lease_until is not None:
            with self._lock:
                heapq.heappush(self._due, (row.lease_until + _MARGIN_US, row.key))

    def _next_due(self, now_us: int) -> str | None:
        with self._lock:
            if not self._due or self._due[0][0] > now_us:
                return None
            return heapq.heappop(self._due)[1]

    def _run(self) -> None:
        while not self._closing.wait(_TICK_S):
            try:
                self._take_back()
            except Exception:
                log.exception("leases_not_looked_at")
