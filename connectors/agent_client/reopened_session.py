"""A session that the gateway has forgotten is opened anew, so that a client of the older protocol outlives a
restart of the gateway.

**Guarantees** that what is sent again was not done: a server that does not know the session answers 404 before
it looks at what is asked.
"""

from __future__ import annotations

import json
from typing import Any, Final

import anyio
import httpx2

from connectors.agent_client.http_client import READ_S, AgentHttpClient
from connectors.agent_client.signed_auth import SignedAuth

_SESSION: Final = "mcp-session-id"
_VERSION: Final = "mcp-protocol-version"
_NOT_FOUND: Final = 404


class ReopeningClient(AgentHttpClient):
    """Remembers how its session was opened. The transport above goes on with the first session's id, which
    stands here for the one that is open now.
    """

    def __init__(self, url: str, auth: SignedAuth, read_s: float = READ_S) -> None:
        super().__init__(url, auth, read_s)
        self._opening: bytes | None = None
        self._current: dict[str, str] = {}
        self._one_at_a_time = anyio.Lock()

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """The server's answer in the session that is open, if need be in a new one."""
        asked = request.headers.get(_SESSION)
        if asked is None:
            response = await super().send(request, **options)
            if _SESSION in response.headers and response.is_success:
                self._opening = request.content
            return response
        used = request.headers[_SESSION] = self._current.get(asked, asked)
        response = await super().send(request, **options)
        if response.status_code != _NOT_FOUND or request.method == "DELETE":
            return response
        async with self._one_at_a_time:
            # Of several requests that fail together the first opens the session for all.
            if self._current.get(asked, asked) == used and not await self._reopened(request, asked):
                return response
        again = httpx2.Request(request.method, request.url, headers=request.headers, content=request.content)
        again.extensions = request.extensions
        again.headers[_SESSION] = self._current[asked]
        return await super().send(again, **options)

    async def _reopened(self, request: httpx2.Request, asked: str) -> bool:
        if self._opening is None:
            return False
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        opening = self.build_request("POST", request.url, content=self._opening, headers=headers)
        opened = await super().send(opening)
        if not opened.is_success or _SESSION not in opened.headers:
            return False
        headers[_SESSION] = opened.headers[_SESSION]
        if _VERSION in request.headers:
            headers[_VERSION] = request.headers[_VERSION]
        ready = json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode()
        told = await super().send(self.build_request("POST", request.url, content=ready, headers=headers))
        if told.is_success:
            self._current[asked] = opened.headers[_SESSION]
        return told.is_success
