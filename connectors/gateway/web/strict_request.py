"""Reads a request's body: bounded before it is parsed, strict when it is parsed (CM-02)."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from connectors.gateway.web.answers import REQUEST_TIMEOUT, ApiError, malformed
from schemas.wire.strict_json import MalformedJsonError, decode
from schemas.wire.verdicts import TOO_LARGE

# What is read, and thrown away, of a body over the limit, so that its sender gets to see the answer.
READ_LIMIT_BYTES: Final = 16 * 1024 * 1024
BODY_TIMEOUT_S: Final = 30.0
# In an ASGI scope: how many seconds a body may take, where that is not BODY_TIMEOUT_S.
BODY_TIMEOUT: Final = "trunkline_body_timeout"


class NotRead(ApiError):
    """The body was not read to its end, so nobody knows what it was: refused without a row (CM-02)."""


class StrictRequest(Request):
    """A request whose body is at most `limit_bytes` long and whose JSON is that of CM-02."""

    def __init__(self, scope: Scope, receive: Receive, limit_bytes: int) -> None:
        super().__init__(scope, receive)
        self._limit_bytes = limit_bytes
        self._read: bytes | None = None
        self._document: Any = None
        self._is_decoded = False

    async def body(self) -> bytes:
        """The whole body. Raises ApiError: 413 over the limit, 408 when it does not come."""
        if self._read is None:
            timeout_s: float = self.scope.get(BODY_TIMEOUT, BODY_TIMEOUT_S)
            try:
                async with asyncio.timeout(timeout_s):
                    self._read = await self._bounded()
            except TimeoutError:
                raise NotRead(
                    408, REQUEST_TIMEOUT, f"no whole body within {timeout_s:g} s", {"Connection": "close"}
                ) from None
            except ClientDisconnect:
                raise malformed("the body ended too early") from None
        return self._read

    async def json(self) -> Any:
        """The decoded body. Raises ApiError (400) with the rule that was broken."""
        if not self._is_decoded:
            try:
                self._document, _ = decode(await self.body())
            except MalformedJsonError as error:
                raise malformed(f"body: {error}") from None
            self._is_decoded = True
        return self._document

    async def _bounded(self) -> bytes:
        announced = self.headers.get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced[:19]) > READ_LIMIT_BYTES:
            raise self._not_read()
        kept, size = bytearray(), 0
        async for chunk in self.stream():
            size += len(chunk)
            if size > READ_LIMIT_BYTES:
                raise self._not_read()
            if size <= self._limit_bytes:
                kept += chunk
            else:
                kept.clear()
        if size > self._limit_bytes:
            raise ApiError(413, TOO_LARGE, f"a body has at most {self._limit_bytes} bytes, this one {size}")
        return bytes(kept)

    def _not_read(self) -> ApiError:
        return NotRead(413, TOO_LARGE, f"a body has at most {self._limit_bytes} bytes", {"Connection": "close"})
