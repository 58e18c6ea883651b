"""The metrics that a gateway shows at `/metrics` (HH-13), in the text format of Prometheus.

They count requests, verdicts, calls of MCP tools and readers of events. Other collectors add the figures of the
live view, the tables and the connections. A label never contains input of an unknown client: a route is its
template, a mailbox is one that exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from connectors.hub.live.settled_feed import SettledRecord

_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


Samples = Iterable[tuple[Sequence[str], float]]
"""The values of the labels, and the value of the metric, for each sample."""


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """Return a Prometheus gauge with one value, which a collector yields. `text` is the gauge's description.

    The name gets the prefix `trunkline_`.
    """
    return GaugeMetricFamily(f"trunkline_{name}", text, value=float(value))


def gauges(name: str, text: str, labels: Sequence[str], samples: Samples) -> GaugeMetricFamily:
    """Return a Prometheus gauge with a value for each combination of labels, which a collector yields.

    The name gets the prefix `trunkline_`. `text` is the description, and `labels` are the names of the labels.
    Each of the `samples` is a pair: the values of the labels, in the order of `labels`, and a number.
    """
    return _filled(GaugeMetricFamily(f"trunkline_{name}", text, labels=labels), samples)


def counters(name: str, text: str, labels: Sequence[str], samples: Samples) -> CounterMetricFamily:
    """Return a Prometheus counter with a value for each combination of labels, which a collector yields.

    The name gets the prefix `trunkline_`. `text` is the description, and `labels` are the names of the labels.
    Each of the `samples` is a pair: the values of the labels, in the order of `labels`, and a number.
    """
    return _filled(CounterMetricFamily(f"trunkline_{name}", text, labels=labels), samples)


def _filled(family: _Family, samples: Samples) -> _Family:
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family


class Metrics:
    """The metrics of one gateway, including those of `collectors`. Thread-safe.

    Most methods count one event each. `text` returns all metrics.
    """

    def __init__(self, collectors: Sequence[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        for collector in collectors:
            self._registry.register(collector)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"trunkline_{name}", text, labels, registry=self._registry)

        self._requests = counter("http_requests", "Requests.", "method", "route", "status")
        self._seconds = Histogram(
            "trunkline_http_request_seconds",
            "How long requests took.",
            ["route"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._by_route: dict[str, Histogram] = {}
        self._counters: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self._verdicts = counter(
            "verdicts", "Records that the live view has settled, since it started.", "verdict", "reason"
        )
        self._direct = counter(
            "direct_requests", "Requests that the engine began, by how they ended.", "result"
        )
        self._calls = counter("mcp_calls", "Calls of MCP tools, by how they ended.", "tool", "result")
        self._readers = Gauge(
            "trunkline_event_readers", "Connections that follow events now.", ["door"], registry=self._registry
        )
        self._dropped = counter(
            "event_readers_dropped", "Connections that were cut off because nobody read from them.", "door"
        )

    def add(self, collector: Collector) -> None:
        """Register a collector. Each scrape of `/metrics` calls its method `collect`, on any thread."""
        self._registry.register(collector)

    def called(self, tool: str, result: str) -> None:
        """Count a call of an MCP tool. `result` is `ok` or the reason of the failure, such as `malformed`."""
        self._count(self._calls, tool, result)

    def direct(self, result: str) -> None:
        """Count a request that the engine began. `result` is `answered`, `refused`, `passed_on` or `left`."""
        self._count(self._direct, result)

    def readers(self, door: str, more: int) -> None:
        """Add `more` to the number of open event streams at a door: 1 when a stream begins, -1 when it ends."""
        self._readers.labels(door).inc(more)

    def dropped(self, door: str) -> None:
        """Count an event stream at a door that the gateway has cut off because its client did not read."""
        self._dropped.labels(door).inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request and its duration in seconds. `route` is the route's path template."""
        self._count(self._requests, method, route, str(status))
        found = self._by_route.get(route)
        if found is None:
            found = self._by_route[route] = self._seconds.labels(route)
        found.observe(seconds)

    def _count(self, counter: Counter, *labels: str) -> None:
        found = self._counters.get((counter, labels))
        if found is None:
            # A look-up by labels takes longer than all else. There are only so many labels.
            found = self._counters[counter, labels] = counter.labels(*labels)
        found.inc()

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Count settled records by verdict and reason.

        The live view's thread calls this method with each batch of settled records.
        """
        for record in records:
            self._count(self._verdicts, record.verdict, record.reason or "")

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus, as bytes.

        It calls all collectors, some of which wait for seconds. Do not call it on the thread of an event loop.
        """
        return generate_latest(self._registry)
