"""Once a second: how much is settled, how far live view and tables are behind, what waits.

The figures are those of this gateway; what they are about (log, tables, mailboxes) is the same at all of them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

from connectors.dashboard.freshness_reader import TableFreshness
from connectors.dashboard.mailbox_depths import MailboxDepths
from connectors.dashboard.shown_rows import jobs_by_state
from connectors.gateway.services.hub import Hub
from connectors.live.settled_feed import SettledRecord
from schemas.wire.ids import JOB
from schemas.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED

PULSE_S: Final = 1.0
_HISTORY: Final = 300


class Pulse:
    """`settled` is called on the live view's thread, `beat` by one thread at a time."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._freshness = TableFreshness(hub.settings, hub.live_view)
        self._depths = MailboxDepths(hub.live_view, hub.mailboxes)
        self._lock = threading.Lock()
        self._verdicts: Counter[str] = Counter()
        self._lag_s = 0.0
        self._jobs_changed = True
        self._jobs: dict[str, int] = {}
        self._beat_at = time.monotonic()
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self.mailboxes: dict[str, Any] = {"mailboxes": [], "messages": 0, "total": 0}

    def begin(self) -> None:
        """Forget what was settled to catch up with the log: that took as long as it took."""
        with self._lock:
            self._verdicts.clear()
            self._lag_s = 0.0

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Count what was settled, and how long it took since Kafka had it."""
        if not records:
            return
        now = time.time()
        oldest = min(record.logged_at_us for record in records) / 1e6
        job = f"{JOB}/"
        with self._lock:
            self._lag_s = max(self._lag_s, now - oldest)
            for record in records:
                self._verdicts[record.verdict] += 1
                self._jobs_changed = self._jobs_changed or record.stream.startswith(job)

    def beat(self) -> dict[str, Any]:
        """The figures since the last time, and as they are now."""
        with self._lock:
            verdicts, self._verdicts = self._verdicts, Counter()
            lag_s, self._lag_s = self._lag_s, 0.0
            jobs_changed, self._jobs_changed = self._jobs_changed, False
        if jobs_changed:
            self._jobs = jobs_by_state(self._hub.live_view)
        now = time.monotonic()
        seconds, self._beat_at = max(now - self._beat_at, 0.001), now
        self.mailboxes = self._depths.deepest()
        tables = self._freshness.measure()
        figures = {
            "at_ms": round(time.time() * 1000),
            "settled_per_s": round(verdicts.total() / seconds, 1),
            ACCEPTED: verdicts[ACCEPTED],
            DUPLICATE: verdicts[DUPLICATE],
            REJECTED: verdicts[REJECTED],
            "live_lag_ms": round(max(0.0, lag_s) * 1000),
            "live_lag_records": sum(self._hub.live_view.lag().values()),
            "tables_behind_records": tables["records"],
            "tables_behind_ms": tables["behind_ms"],
            "messages": self.mailboxes["messages"],
        }
        self._history.append(figures)
        return {**figures, "jobs": self._jobs, "kafka_is_away": self._hub.appender.away is not None}

    def history(self) -> list[dict[str, Any]]:
        """The figures of the last minutes, oldest first."""
        return list(self._history)
