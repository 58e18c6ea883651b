"""Plans of single requests to the hub's API, whose bodies and answers are JSON, and their idempotency keys.

While a message is handled, the keys come from its id, so that a repeated handling sends nothing twice: after a
crash it makes the same keys, and the hub recognizes the requests. Such a key also has the hash of the request
and a count of equal requests: a handling that sends another content makes another request, and no message is
lost. With a `key` of the caller, and for a reply, the place counts instead of the content: the message of the
first handling stands.

The library for JavaScript makes the same keys, so the second handling may be in the other language. Both are
tested with `derived_keys` of connectors/agent_sdk/vectors/hub.json.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from itertools import count
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from trunkline_agent.errors import UsageError
from trunkline_agent.hub.plans import Answer, Plan, Request, Retries, exchange

API: Final = "/api/hub"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
JSON_CONTENT: Final = "application/json"
_KEY_MOST: Final = 255
# JavaScript writes a whole number below this one without a fraction, whatever computed it.
_WHOLE_MOST: Final = 2**53


def path_of(*parts: str) -> str:
    """Return a path of the hub's API, `/api/hub/` and `parts`, with each part quoted for a URL."""
    return "/".join((API, *(quote(part, safe="") for part in parts)))


def get_json(
    path: str,
    query: Mapping[str, Any] | None = None,
    *,
    retries: Retries,
    headers: Mapping[str, str] | None = None,
    wait_s: float = 0.0,
) -> Plan[Any]:
    """Send a GET request and return the JSON of the answer as Python values.

    Args:
        path: The path, see `path_of`.
        query: The query parameters. None values are left out.
        retries: When the request is sent again.
        headers: Further headers.
        wait_s: How many seconds the hub may wait before it answers.

    Raises:
        TrunklineError: As `exchange` raises it.
    """
    answer = yield from exchange(Request("GET", path, query, headers or {}, wait_s=wait_s), retries)
    return answer.json()


def post_json(
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    retries: Retries,
    key: str | None = None,
    query: Mapping[str, Any] | None = None,
    wait_s: float = 0.0,
    is_final: Callable[[Answer], bool] | None = None,
) -> Plan[Any]:
    """Send a POST request with an idempotency key, and return the JSON of the answer as Python values.

    Args:
        path: The path, see `path_of`.
        body: The fields of the JSON body. None values are left out. None sends no body.
        retries: When the request is sent again.
        key: The idempotency key: the same key is the same request. None makes a new one for this call.
        query: The query parameters. None values are left out.
        wait_s: How many seconds the hub may wait before it answers.
        is_final: See `exchange`.

    Raises:
        UsageError: The body cannot be JSON, or the key is not valid.
        TrunklineError: As `exchange` raises it.
    """
    headers = {IDEMPOTENCY_KEY: new_key() if key is None else checked_key(key)}
    content = b""
    if body is not None:
        content = encoded({name: value for name, value in body.items() if value is not None})
        headers["Content-Type"] = JSON_CONTENT
    request = Request("POST", path, query, headers, content, wait_s)
    answer = yield from exchange(request, retries, is_final)
    return answer.json()


def new_key() -> str:
    """Return a new idempotency key or request id."""
    return str(uuid.uuid4())


def checked_key(key: str) -> str:
    """Return a caller's idempotency key. Raises UsageError unless it is 1 to 255 visible ASCII characters."""
    if not 0 < len(key) <= _KEY_MOST or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"key: {key[:_KEY_MOST]!r} is not 1 to {_KEY_MOST} visible ASCII characters")
    return key


def encoded(body: Any) -> bytes:
    """Return the JSON of a body as bytes. Raises UsageError for values that JSON does not have."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the body cannot be JSON: {error}") from None


class SendKey(NamedTuple):
    """The key of a request.

    Attributes:
        text: The idempotency key.
        may_stand: Whether an earlier handling may have sent another content under this key, which then stands.
    """

    text: str
    may_stand: bool = False


class Handling:
    """One handling of a message, from which the keys of its requests are derived. Thread-safe."""

    def __init__(self, message_id: str, attempt: int | None) -> None:
        self._message_id = message_id
        self._is_repeated = (attempt or 1) > 1
        self._counts: dict[str, count[int]] = {}

    def content_key(self, what: str, content: bytes) -> SendKey:
        """Return the key of a request with this content; the next one with the same gets another key.

        Args:
            what: The kind of the request, and what its path names.
            content: Its body, a JSON text.
        """
        hashed = what.encode("utf-8", "surrogatepass") + b"\0" + _in_one_form(content)
        digest = hashlib.sha256(hashed).hexdigest()[:32]
        return SendKey(f"{self._message_id}/{digest}/{self._next(digest)}")

    def reply_key(self) -> SendKey:
        """Return the key of the next reply to the message."""
        return SendKey(f"{self._message_id}/reply/{self._next('reply')}", self._is_repeated)

    def own_key(self, key: str) -> SendKey:
        """Return the key that belongs to a key of the caller within this handling."""
        text = f"{self._message_id}/key/{checked_key(key)}"
        if len(text) > _KEY_MOST:
            text = f"{self._message_id}/key/{hashlib.sha256(key.encode('ascii')).hexdigest()}"
        return SendKey(text, self._is_repeated)

    def _next(self, what: str) -> int:
        # Both calls are atomic in CPython.
        return next(self._counts.setdefault(what, count(1)))


def _in_one_form(content: bytes) -> bytes:
    """Return a JSON text in the one form that equal contents have in every language: sorted keys, no spaces."""
    found = json.loads(content, parse_float=_number)
    return json.dumps(found, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def _number(text: str) -> Any:
    number = float(text)
    # JavaScript knows one other zero, the negative one.
    is_whole = number.is_integer() and (number != 0 or not text.startswith("-"))
    return int(number) if is_whole and abs(number) < _WHOLE_MOST else number


HANDLED: Final[ContextVar[Handling | None]] = ContextVar("trunkline_handled_message", default=None)
"""The handling in whose block the present code runs; None outside of one."""


def send_key(what: str, content: bytes, key: str | None) -> SendKey:
    """Return the idempotency key of a request: derived within a handling, else the caller's or a new one.

    Raises UsageError if the caller's key is not valid.
    """
    handling = HANDLED.get()
    if handling is None:
        return SendKey(new_key() if key is None else checked_key(key))
    return handling.content_key(what, content) if key is None else handling.own_key(key)
