"""Connections in `/metrics`: how many are open, and how many were ended by the budget, for each listener."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from connectors.gateway.web.connection_budget import ConnectionBudget


class ConnectionFigures(Collector):
    """The figures of some budgets."""

    def __init__(self, budgets: Sequence[ConnectionBudget]) -> None:
        self._budgets = budgets

    def collect(self) -> Iterable[Metric]:
        """Read the budgets; called on another thread than theirs."""
        open_now = GaugeMetricFamily(
            "trunkline_connections",
            "Open connections, by listener and whether a request on them was admitted.",
            labels=["listener", "state"],
        )
        cut = CounterMetricFamily(
            "trunkline_connections_cut",
            "Connections that the gateway ended or refused, by listener and reason.",
            labels=["listener", "reason"],
        )
        for budget in self._budgets:
            for (listener, is_known), count in sorted(dict(budget.open).items()):
                open_now.add_metric([listener, "authenticated" if is_known else "anonymous"], count)
            for names, count in sorted(dict(budget.cut).items()):
                cut.add_metric(names, count)
        yield open_now
        yield cut
