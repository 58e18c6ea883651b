"""Checks of requests: bodies with a size limit and the strict JSON rules of CM-02, and names in `Host`.

A page of another site may reach a loopback port under a name that resolves to it (DNS rebinding), so a door
answers under known names alone. Names are equal whatever their case, and with or without the dot of the DNS
root at their end (RFC 9110, section 4.2.3; RFC 3986, section 3.2.2).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from connectors.hub.serving.answers import REQUEST_TIMEOUT, ApiError, malformed
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.verdicts import TOO_LARGE

# A body over its limit is read this far and dropped, so that its sender gets to read the answer.
READ_LIMIT_BYTES: Final = 16 * 1024 * 1024
BODY_TIMEOUT_S: Final = 30.0
# The key of an ASGI scope for the time limit of a body in seconds, instead of BODY_TIMEOUT_S.
BODY_TIMEOUT: Final = "trunkline_body_timeout"
# The key for a function that returns the whole body once, or None if the body has not arrived yet.
WHOLE_BODY: Final = "trunkline_whole_body"
_JSON: Final = b"application/json"

UNSUPPORTED: Final = "unsupported_media_type"
_CHARSET: Final = re.compile(rb";\s*charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)
_UTF_8: Final = (b"utf-8", b"utf8", b"us-ascii")


class NotRead(ApiError):
    """An error for a body that was not read to its end. It is not recorded, because its content is unknown."""


class StrictRequest(Request):
    """A request whose body has at most `limit_bytes` bytes, and whose JSON follows the strict rules of CM-02.

    For example, these rules forbid a repeated key in an object. `body` and `json` check the request when they
    are called.
    """

    def __init__(self, scope: Scope, receive: Receive, limit_bytes: int) -> None:
        super().__init__(scope, receive)
        self._limit_bytes = limit_bytes
        self._read: bytes | None = None
        self._document: Any = None
        self._is_decoded = False

    async def body(self) -> bytes:
        """Read the whole body and return it. Further calls return the same bytes.

        Raises:
            ApiError: 413 for a body over the limit, 408 if the body does not arrive in time, 400 if the client
                disconnects before its end, and as `check_body_headers`.
        """
        if self._read is None:
            check_body_headers(self.scope)
            # Most bodies arrive with the head. Then no timer is needed.
            arrived: bytes | None = self.scope.pop(WHOLE_BODY, _not_arrived)()
            if arrived is not None and len(arrived) <= self._limit_bytes:
                self._read = arrived
                return arrived
            if arrived is not None:
                raise self._too_large(len(arrived))
            timeout_s: float = self.scope.get(BODY_TIMEOUT, BODY_TIMEOUT_S)
            try:
                async with asyncio.timeout(timeout_s):
                    self._read = await self._bounded()
            except TimeoutError:
                raise NotRead(
                    408,
                    REQUEST_TIMEOUT,
                    f"the body did not arrive within {timeout_s:g} s",
                    {"Connection": "close"},
                ) from None
            except ClientDisconnect:
                raise malformed("the body ended too early") from None
        return self._read

    async def json(self) -> Any:
        """Read the body and return it as decoded JSON. Further calls return the same object.

        Raises:
            ApiError: 400 with the broken rule, such as a repeated key, and if the client disconnects. 413 for a
                body over the limit. 408 if the body does not arrive in time.
        """
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
            raise self._too_large(size)
        return bytes(kept)

    def _too_large(self, size: int) -> ApiError:
        return ApiError(413, TOO_LARGE, f"a body has at most {self._limit_bytes} bytes, this one {size}")

    def _not_read(self) -> ApiError:
        return NotRead(413, TOO_LARGE, f"a body has at most {self._limit_bytes} bytes", {"Connection": "close"})


def check_body_headers(scope: Scope, *, is_text: bool = True) -> None:
    """Refuse a body whose headers give its bytes a meaning that no reader here looks at (RFC 9110, section 8).

    Args:
        scope: The ASGI scope of the request.
        is_text: Whether the body is read as text, which must be in UTF-8. Stored contents may have any.

    Raises:
        ApiError: 415 for a content coding such as gzip, or a charset other than UTF-8; 400 for a part of a
            content (section 14.5).
    """
    for name, value in scope["headers"]:
        if name == b"content-type":
            charset = _CHARSET.search(value) if is_text and len(value) > len(_JSON) else None
            if charset is not None and charset[1].lower() not in _UTF_8:
                raise ApiError(415, UNSUPPORTED, "the body must be in UTF-8; send it so, without a charset")
        elif name == b"content-encoding":
            if value.lower() != b"identity":
                why = "the body must have no content coding; send it without Content-Encoding"
                raise ApiError(415, UNSUPPORTED, why, {"Accept-Encoding": "identity"})
        elif name == b"content-range":
            raise malformed("a body with Content-Range is not accepted: send the whole content")


def _not_arrived() -> bytes | None:
    return None


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that yields a body that was read from `receive`, then what follows it."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
NOT_KNOWN: Final = "name it in the setting gateway.host_names"
"""The advice for a request under a name that the door does not know."""
_SHOWN_CHARACTERS: Final = 100


def name_and_port(host: str) -> tuple[str, str]:
    """Return the name and the port of a header `Host`: the name in lower case, and an empty text for no port.

    An IPv6 address keeps its brackets. A text that is no such header gives a name that no door has.
    """
    name, colon, port = host.rpartition(":")
    if not colon or "]" in port:
        name, port = host, ""
    return name.lower().removesuffix("."), port


class HostNames:
    """A set of host names.

    Args:
        names: Names and addresses without ports. An IPv6 address may lack its brackets.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(
            name_and_port(f"[{name}]" if ":" in name and not name.startswith("[") else name)[0]
            for name in names
            if name
        )

    def __contains__(self, name: str) -> bool:
        """Return whether the set has a name, which `name_and_port` returned."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, sorted."""
        return iter(sorted(self._names))


def shown(host: str) -> str:
    """Return a header `Host` for an error text: quoted, and cut after 100 characters."""
    return repr(host[:_SHOWN_CHARACTERS])
