"""Plans of single requests to the hub's API, whose bodies and answers are JSON."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

from trunkline_agent.errors import UsageError
from trunkline_agent.hub.plans import Answer, Plan, Request, Retries, exchange

API: Final = "/api/hub"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
JSON_CONTENT: Final = "application/json"
_KEY_MOST: Final = 255


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
