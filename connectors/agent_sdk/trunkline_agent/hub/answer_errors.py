"""The errors that belong to the hub's answers, with the hub's own text, reason and time to wait.

The library for JavaScript has the same table. Both are tested with `refusals` of
connectors/agent_sdk/vectors/hub.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from trunkline_agent.errors import (
    BackboneUnreachable,
    MessageRejected,
    NotFound,
    RateLimited,
    Refused,
    TrunklineError,
    UsageError,
)
from trunkline_agent.wire.retry_after import retry_after_s
from trunkline_agent.wire.verdicts import POLICY, SEQ_CONFLICT

RefusalOf: TypeAlias = Callable[[int, Mapping[str, str], bytes], Exception]
"""A function that returns the error of an answer without success: its status, headers and body."""

# The reason of a 502 that the program of an agent causes. Another 502 means that the gateway is away.
LAUNCH_FAILED: Final = "launch_failed"
_TEXT_MOST: Final = 600
_KINDS: Final[dict[int, type[TrunklineError]]] = {
    HTTPStatus.BAD_REQUEST: UsageError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: UsageError,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: UsageError,
    HTTPStatus.UNPROCESSABLE_ENTITY: UsageError,
    HTTPStatus.UNAUTHORIZED: Refused,
    HTTPStatus.FORBIDDEN: Refused,
    HTTPStatus.CONFLICT: Refused,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.GONE: NotFound,
    HTTPStatus.REQUEST_TIMEOUT: BackboneUnreachable,
    HTTPStatus.BAD_GATEWAY: BackboneUnreachable,
    HTTPStatus.SERVICE_UNAVAILABLE: BackboneUnreachable,
    HTTPStatus.GATEWAY_TIMEOUT: BackboneUnreachable,
}
_ADVICE: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "check the token in the credentials; it may have been revoked",
    HTTPStatus.BAD_GATEWAY: "'trunkline doctor' says what is down",
    HTTPStatus.SERVICE_UNAVAILABLE: "'trunkline doctor' says what is down",
    HTTPStatus.GATEWAY_TIMEOUT: "'trunkline doctor' says what is down",
}


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> TrunklineError:
    """Return the error, for the caller to raise, of an answer without success.

    It is UsageError (400, 413, 415, 422), Refused (401, 403, 409, and 502 `launch_failed`), RateLimited (429),
    NotFound (404, 410), BackboneUnreachable (408, 502, 503, 504), or TrunklineError. `.reason` is that of the
    answer, if it has one.
    """
    reason, text = said_in(body)
    message = f"{text or f'HTTP status {status}'}"
    if reason is not None and reason not in message:
        message = f"{message} ({reason})"
    advice = _ADVICE.get(status)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        wait_s = retry_after_s(headers)
        return RateLimited(
            message,
            retry_after_s=wait_s,
            reason=reason,
            advice=f"try again in {wait_s:g} s" if wait_s else None,
        )
    if status == HTTPStatus.BAD_GATEWAY and reason == LAUNCH_FAILED:
        return Refused(message, reason=reason)
    if (kind := _KINDS.get(status)) is not None:
        return kind(message, reason=reason, advice=advice)
    return TrunklineError(f"the hub answered {status}: {message}", reason=reason)


def retry_after_of(outcome: Any) -> float:
    """Return the seconds that an answer asks to wait, 0 without such a header or without an answer."""
    return retry_after_s(getattr(outcome, "headers", {}))


def rejection_of(error: TrunklineError) -> TrunklineError:
    """Return the error of a request that sends a message: MessageRejected if the message itself was refused."""
    if type(error) is Refused and error.reason in (SEQ_CONFLICT, POLICY):
        return MessageRejected(*error.args, reason=error.reason, advice=error.advice)
    return error


def said_in(body: bytes) -> tuple[str | None, str | None]:
    """Return reason and text of an error's body, as one line without control characters; None without them."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(found, dict):
        return None, None
    reason, text = found.get("reason"), found.get("message")
    return _plain(reason), _plain(text)


def _plain(text: Any) -> str | None:
    if not isinstance(text, str) or not text:
        return None
    # A terminal obeys control characters, and the text may quote another client's.
    return "".join(one if one.isprintable() else "�" for one in text[:_TEXT_MOST])
