"""Answers HEAD like GET, without the body (RFC 9110, sections 9.1 and 9.3.2)."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from connectors.gateway.web.bounded_http import ABORT

_NO_BODY: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": False}


class HeadRequests:
    """ASGI middleware that serves each HEAD as the GET of the same path, and sends the head of its answer.

    A stream ends at once, because its client counts as disconnected. Place it inside the access log, which then
    logs and counts the request as HEAD.

    Args:
        app: The application.
        unsafe_paths: Paths on which GET changes something. HEAD is left to the application there.
    """

    def __init__(self, app: ASGIApp, unsafe_paths: Container[str] = ()) -> None:
        self._app = app
        self._unsafe_paths = unsafe_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, a HEAD as GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] in self._unsafe_paths:
            await self._app(scope, receive, send)
            return
        is_sent = False

        async def send_head(message: Message) -> None:
            nonlocal is_sent
            if is_sent or message["type"] != "http.response.start":
                return
            is_sent = True
            scope["method"] = "HEAD"  # the server looks at it, too: this answer has no chunks
            await send(message)
            await send(_NO_BODY)

        # A stream that is broken off aborts its connection. This one is at its end.
        scope.pop(ABORT, None)
        scope["method"] = "GET"
        try:
            await self._app(scope, receive, send_head)
        finally:
            scope["method"] = "HEAD"
