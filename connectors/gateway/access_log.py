"""One log line for each request (method, the route's template, status, time, principal), and its metrics.

Never the path as it was sent, its query, a header or a body: there may be a secret in any of them.
"""

from __future__ import annotations

import time
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from connectors.gateway.metrics import Metrics

log = structlog.stdlib.get_logger(__name__)

# Others are anybody's invention.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics"})


class AccessLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request and log how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = scope.get("trunkline_route", "no route")
            method, seconds = scope["method"] if scope["method"] in _METHODS else "?", time.monotonic() - begun
            self._metrics.answered(method, route, status, seconds)
            (log.debug if route in _QUIET else log.info)(
                "request",
                method=method,
                route=route,
                status=status,
                ms=round(seconds * 1000, 1),
                principal=scope.get("trunkline_principal"),
            )
