"""The metrics that a gateway shows at `/metrics` (HH-13), and the access log of HTTP requests.

The metrics count requests, verdicts, calls of MCP tools and readers of events, in the format of Prometheus.
Other collectors add the figures of the live view, the tables and the connections. A label never contains input
of an unknown client: a route is its template, a mailbox is one that exists.

A line of the log has the method, route template, status, time and principal. It never has the path that was
sent, a query, a header or a body, because each may contain a secret. Health checks and successful polls of the
stack's own parts have no line, because they would push the requests of clients out of the rotated log. For the
same reason requests without a principal are logged at a bounded rate. The metrics count all requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.serving.shares import ByteBudget, send_in_pieces
from connectors.plumbing.machine.json_log import FrequentLines, LogLimit

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


log = structlog.stdlib.get_logger(__name__)

# Any other method name is input of the client, so it is logged as "?".
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_HEALTH: Final = frozenset({"/healthz", "/readyz", "/metrics"})
# Pumps and bridges poll these. A lease that hands out messages is a record of the log anyway.
_POLLED: Final = frozenset({"/api/hub/pump/lease", "/api/hub/mqtt-agents", "/api/hub/brokers"})
# How many pairs of route and status have a limit of their own.
_STRANGERS_KINDS: Final = 32


class RequestLines(LogLimit[tuple[str, int]]):
    """The lines of all doors of a gateway: one for each request, and fewer for those without a principal.

    The first request without a principal is logged for each route and status. Later ones are counted for some
    seconds; the next line has their number. Not thread-safe: for one event loop.
    """

    def __init__(self) -> None:
        super().__init__(most=_STRANGERS_KINDS)
        self._lines = FrequentLines("request", __name__, ("method", "route", "status", "principal", "omitted"))

    def add(self, method: str, route: str, status: int, seconds: float, principal: str | None) -> None:
        """Log an answered request, unless it is routine or its line is left out. `seconds` is its duration."""
        if route in _HEALTH or (route in _POLLED and 200 <= status < 300):
            return
        omitted = 0 if principal else self.omitted((route, status))
        if omitted is not None:
            self._lines.add((method, route, status, principal, omitted or None), seconds)

    def log_omitted(self) -> None:
        """Log how many lines were left out, for each route and status whose interval has ended.

        Call it every few seconds. Without such calls, the number is logged only with the next request of that
        kind.
        """
        for kind, omitted in self.due():
            route, status = kind or ("other", 0)
            log.info("requests_omitted", route=route, status=status, omitted=omitted)

    def flush(self) -> None:
        """Write the lines that wait. Call it when all doors have ended."""
        self._lines.flush()


class AccessLog:
    """ASGI middleware that writes a log line for each HTTP request and counts it in the metrics.

    It also sends long bodies in pieces, and gives the bytes back that a request has reserved, once it is
    answered. Other ASGI messages than HTTP are passed on.

    Args:
        app: The application.
        metrics: The metrics.
        lines: The lines of this gateway.
        budget: The budget in which requests reserve the bytes of their answers.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, lines: RequestLines, budget: ByteBudget) -> None:
        self._app = app
        self._metrics = metrics
        self._lines = lines
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, then log and count its status and duration."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0
        rooms = self._budget.begin_request()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body"):
                rooms.resize(len(message.get("body", b"")))
            await send_in_pieces(send, message)

        try:
            await self._app(scope, receive, watched)
        finally:
            rooms.close()
            route = scope.get("trunkline_route", "no route")
            method, seconds = scope["method"] if scope["method"] in _METHODS else "?", time.monotonic() - begun
            self._metrics.answered(method, route, status, seconds)
            self._lines.add(method, route, status, seconds, scope.get("trunkline_principal"))
