"""The metrics of messages that a reader holds for too long by extensions of its lease: it may hang."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from connectors.gateway.services.mailboxes import MailboxIndex
from connectors.gateway.web.metrics import gauge, gauges
from connectors.live.live_view import LiveView
from connectors.live.log_clock import LogClock
from schemas.streams.mailboxes.message import MessageRow

# As many pairs of a mailbox and a reader have a sample of their own.
_NAMED: Final = 50


class LeaseMetrics(Collector):
    """A metrics collector that names the readers that hold a message for longer than a time. Thread-safe."""

    def __init__(
        self, live_view: LiveView, mailboxes: MailboxIndex, log_clock: LogClock, long_lease_s: float
    ) -> None:
        self._live_view = live_view
        self._mailboxes = mailboxes
        self._log_clock = log_clock
        self._long_lease_us = round(long_lease_s * 1e6)

    def collect(self) -> Iterable[Metric]:
        """Yield the number of these messages, and for each mailbox and reader the longest time in seconds.

        Prometheus calls this method at each scrape.
        """
        now_us = self._log_clock.now_us()
        keys = self._mailboxes.long_held(now_us - self._long_lease_us, now_us)
        yield gauge("long_leases", "Messages that readers hold for too long.", len(keys))
        longest: dict[tuple[str, str], float] = {}
        for key in keys:
            row = self._live_view.get(MessageRow, key)
            if row is not None and row.handed_at is not None and len(longest) < _NAMED:
                held_s = (now_us - row.handed_at) / 1e6
                longest.setdefault((f"{row.realm}/{row.recipient}", row.handed_to or ""), held_s)
        yield gauges(
            "long_lease_seconds",
            f"Seconds that a reader holds a message of a mailbox for too long, of the {_NAMED} longest.",
            ["mailbox", "reader"],
            longest.items(),
        )
