"""The dashboard's figures of each second: settled records, lag of live view and tables, depth of mailboxes.

The rates and the live view's lag are those of this gateway. The log, the tables and the mailboxes are the same
at all gateways.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

from connectors.doors.dashboard.mailbox_board import MailboxBoard
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.live.table_progress_reader import TableLag, ViewProgressReader
from connectors.hub.services.hub import Hub
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED

PULSE_S: Final = 1.0
_HISTORY: Final = 300


class Pulse:
    """The figures of the dashboard, computed once a second, with a history of five minutes.

    The live view's thread calls `settled`. Only one thread at a time may call `beat`. `mailboxes` is the result
    of `MailboxBoard.deepest` at the last call of `beat`, with empty values before the first.
    """

    def __init__(self, hub: Hub, board: MailboxBoard) -> None:
        self._hub = hub
        self._board = board
        self._lag = TableLag(hub.live_view)
        self._views = ViewProgressReader(hub.settings)
        self._lock = threading.Lock()
        self._verdicts: Counter[str] = Counter()
        self._lag_s = 0.0
        self._beat_at = time.monotonic()
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self.mailboxes: dict[str, Any] = {"mailboxes": [], "messages": 0, "total": 0}

    def begin(self) -> None:
        """Reset the counts and the lag. Call this method once, when the live view is open.

        While the live view opens, it settles old records of the log. Without the reset, their age would be
        shown as the present lag.
        """
        with self._lock:
            self._verdicts.clear()
            self._lag_s = 0.0

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Count records by verdict for the next `beat`, and measure how long ago Kafka received the oldest one.

        The live view's thread calls this method with each batch of records that it has settled.
        """
        if not records:
            return
        now = time.time()
        oldest = min(record.logged_at_us for record in records) / 1e6
        with self._lock:
            self._lag_s = max(self._lag_s, now - oldest)
            for record in records:
                self._verdicts[record.verdict] += 1

    def beat(self) -> dict[str, Any]:
        """Return the figures since the last call as JSON, and append them to the history.

        The rates are for each second. This method reads the progress of the view tables from disk, so it must
        not run in the event loop. `tables_behind_records` and `tables_behind_ms` are None while there are no
        view tables, or while they cannot be read.
        """
        with self._lock:
            verdicts, self._verdicts = self._verdicts, Counter()
            lag_s, self._lag_s = self._lag_s, 0.0
        now = time.monotonic()
        seconds, self._beat_at = max(now - self._beat_at, 0.001), now
        self.mailboxes = self._board.deepest()
        records_behind, behind_ms = self._table_lag()
        figures = {
            "at_ms": round(time.time() * 1000),
            "settled_per_s": round(verdicts.total() / seconds, 1),
            **{verdict: verdicts[verdict] for verdict in (ACCEPTED, DUPLICATE, REJECTED)},
            "live_lag_ms": round(max(0.0, lag_s) * 1000),
            "live_lag_records": sum(self._hub.live_view.lag().values()),
            "tables_behind_records": records_behind,
            "tables_behind_ms": behind_ms,
            "messages": self.mailboxes["messages"],
        }
        self._history.append(figures)
        return {
            **figures,
            "jobs": self._hub.lists.jobs_by_state(),
            "kafka_is_away": self._hub.appender.away is not None,
            "webhooks": self._board.webhooks(),
        }

    def _table_lag(self) -> tuple[int, int] | tuple[None, None]:
        """Return the number of settled records that the view tables lack, and the oldest one's age in ms.

        Both are None while there are no tables or they cannot be read.
        """
        self._lag.look(self._hub.live_view.next_offsets())
        try:
            progress = self._views.read()
        except TrunklineError:
            progress = None
        if progress is None:
            return None, None
        lag = self._lag.behind(progress.offsets)
        return sum(lag.records.values()), round(lag.seconds * 1000)

    def history(self) -> list[dict[str, Any]]:
        """Return the figures of the last 300 calls of `beat` (about five minutes), oldest first.

        They have the keys of the result of `beat`, except `jobs`, `kafka_is_away` and `webhooks`, which matter
        only for the present.
        """
        return list(self._history)
