"""`/metrics` (HH-13), in Prometheus' text format: requests, verdicts by reason, live-view lag, mailbox depth,
agents by status, calls of MCP tools, who follows events, this process, and what other collectors bring.

Labels never hold what a stranger sent: a route is its template, a mailbox one that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.registry import Collector

from connectors.live.settled_feed import SettledRecord

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """The metrics of one gateway, with those of `collectors`. Thread-safe."""

    def __init__(self, collectors: Sequence[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        for collector in collectors:
            self._registry.register(collector)
        self._requests = Counter(
            "trunkline_http_requests", "Requests.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "trunkline_http_request_seconds",
            "How long requests took.",
            ["route"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._verdicts = Counter(
            "trunkline_verdicts",
            "Records that the live view has settled, since it started.",
            ["verdict", "reason"],
            registry=self._registry,
        )

        self._calls = Counter(
            "trunkline_mcp_calls",
            "Calls of MCP tools, by how they ended.",
            ["tool", "result"],
            registry=self._registry,
        )
        self._readers = Gauge(
            "trunkline_event_readers",
            "Connections that follow events now.",
            ["door"],
            registry=self._registry,
        )
        self._dropped = Counter(
            "trunkline_event_readers_dropped",
            "Connections that were cut off because nobody read from them.",
            ["door"],
            registry=self._registry,
        )

    def add(self, collector: Collector) -> None:
        """Add figures that are read when they are asked for."""
        self._registry.register(collector)

    def called(self, tool: str, result: str) -> None:
        """A tool was called; `result` is `ok` or the reason why not. Both are names of ours."""
        self._calls.labels(tool, result).inc()

    def readers(self, door: str, more: int) -> None:
        """So many more follow events at a door."""
        self._readers.labels(door).inc(more)

    def dropped(self, door: str) -> None:
        """A reader was cut off."""
        self._dropped.labels(door).inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Count verdicts; called on the live view's thread."""
        for record in records:
            self._verdicts.labels(record.verdict, record.reason or "").inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)
