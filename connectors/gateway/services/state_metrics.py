"""Prometheus metrics of the live view: its lag, the depth of mailboxes, and participants by status."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from connectors.gateway.services.mailboxes import MailboxIndex
from connectors.gateway.web.metrics import gauge, gauges
from connectors.live.live_view import LiveView
from schemas.streams.agents.participants import PARTICIPANT_STATES, ParticipantRow

# Only the deepest mailboxes have a sample of their own.
_MAILBOXES: Final = 200


class StateMetrics(Collector):
    """A collector that reads the live view at each scrape."""

    def __init__(self, live_view: LiveView, mailboxes: MailboxIndex) -> None:
        self._live_view = live_view
        self._mailboxes = mailboxes

    def collect(self) -> Iterable[Metric]:
        """Yield the lag, the depth of mailboxes and the number of participants by status."""
        lag = sorted(self._live_view.lag().items())
        yield gauges(
            "live_view_lag_records",
            "Records that the live view lags.",
            ["partition"],
            (([str(partition)], records) for partition, records in lag),
        )
        depths = self._mailboxes.depths()
        yield gauge("mailbox_messages", "Messages that wait in all mailboxes.", sum(depths.values()))
        deepest = sorted(depths.items(), key=lambda found: -found[1])[:_MAILBOXES]
        yield gauges(
            "mailbox_depth",
            f"Messages that wait in a mailbox, of the {_MAILBOXES} deepest.",
            ["mailbox"],
            ((["/".join(mailbox)], count) for mailbox, count in deepest),
        )
        counts = Tally(row.status for row in self._live_view.all(ParticipantRow))
        states = (([status], counts[status]) for status in PARTICIPANT_STATES)
        yield gauges("agents", "Agents that take part, by status.", ["status"], states)
