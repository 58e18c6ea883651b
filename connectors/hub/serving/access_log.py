"""The access log of HTTP requests, and their metrics.

A line has the method, route template, status, time and principal. It never has the path that was sent, a query,
a header or a body, because each may contain a secret. Health checks and successful polls of the stack's own
parts have no line, because they would push the requests of clients out of the rotated log. For the same reason
requests without a principal are logged at a bounded rate. The metrics count all requests.
"""

from __future__ import annotations

import time
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from connectors.hub.fairness.byte_budget import ByteBudget, send_in_pieces
from connectors.hub.serving.metrics import Metrics
from connectors.plumbing.machine.json_log import FrequentLines, LogLimit

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
