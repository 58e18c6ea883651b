"""Prometheus metrics of the live view: its lag, the depth of mailboxes, and participants by status."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from connectors.gateway.services.mailboxes import MailboxIndex
from connectors.live.live_view import LiveView
from schemas.fold.life_cycles import PARTICIPANT_STATES
from schemas.fold.view_rows import ParticipantRow

# Only the deepest mailboxes have a sample of their own.
_MAILBOXES: Final = 200


class StateMetrics(Collector):
    """A collector that reads the live view at each scrape."""

    def __init__(self, live_view: LiveView, mailboxes: MailboxIndex) -> None:
        self._live_view = live_view
        self._mailboxes = mailboxes

    def collect(self) -> Iterable[Metric]:
        """Yield the lag, the depth of mailboxes and the number of participants by status."""
        lag = GaugeMetricFamily(
            "trunkline_live_view_lag_records",
            "Records that the live view lags.",
            labels=["partition"],
        )
        for partition, records in sorted(self._live_view.lag().items()):
            lag.add_metric([str(partition)], records)
        yield lag
        depths = self._mailboxes.depths()
        yield GaugeMetricFamily(
            "trunkline_mailbox_messages", "Messages that wait in all mailboxes.", value=sum(depths.values())
        )
        depth = GaugeMetricFamily(
            "trunkline_mailbox_depth",
            f"Messages that wait in a mailbox, of the {_MAILBOXES} deepest.",
            labels=["mailbox"],
        )
        for mailbox, count in sorted(depths.items(), key=lambda found: -found[1])[:_MAILBOXES]:
            depth.add_metric(["/".join(mailbox)], count)
        yield depth
        agents = GaugeMetricFamily("trunkline_agents", "Agents that take part, by status.", labels=["status"])
        counts = Tally(row.status for row in self._live_view.all(ParticipantRow))
        for status in PARTICIPANT_STATES:
            agents.add_metric([status], counts[status])
        yield agents
