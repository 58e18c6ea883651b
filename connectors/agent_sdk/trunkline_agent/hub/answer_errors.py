"""The errors that belong to the hub's answers, with the hub's own text and reason, and the time to wait.

The library for JavaScript has the same table. Both are tested with `refusals` of
connectors/agent_sdk/vectors/hub.json. The header `Retry-After` has seconds, or a moment in one of the three
forms of RFC 9110.
"""

from __future__ import annotations

import json
import re
import time
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
from trunkline_agent.wire.verdicts import POLICY, SEQ_CONFLICT

# More than RFC 9110 allows: a server that writes a float means it.
_SECONDS: Final = re.compile(r"[0-9]+(\.[0-9]+)?(e[0-9]+)?|inf")
_MONTHS: Final = "JanFebMarAprMayJunJulAugSepOctNovDec"
_CLOCK: Final = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
# IMF-fixdate, RFC 850 with two digits for the year, and asctime. Some servers write another zone than GMT.
_ZONE: Final = r" (?:GMT|UTC|Z|(?P<zone>[-+]\d{4}))"
_FORMS: Final = tuple(
    re.compile(form)
    for form in (
        rf"[A-Z][a-z]{{2}}, (?P<day>\d\d?) (?P<month>[A-Z][a-z]{{2}}) (?P<year>\d{{4}}) {_CLOCK}{_ZONE}",
        rf"[A-Z][a-z]{{5,8}}, (?P<day>\d\d)-(?P<month>[A-Z][a-z]{{2}})-(?P<year>\d\d) {_CLOCK}{_ZONE}",
        rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) (?P<day>[ \d]\d) {_CLOCK} (?P<year>\d{{4}})",
    )
)
_YEARS_AHEAD: Final = 50
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


def retry_after_s(headers: Mapping[str, str], now_s: float | None = None) -> float:
    """Return the seconds that an answer asks to wait, 0 without such a header or with one that cannot be read.

    Args:
        headers: The headers of the answer, by names in lower case. A moment is compared with that of the header
            `date`, so the clocks of the two sides need not agree.
        now_s: The time of this machine in seconds since 1970, for an answer without that header. None: now.
    """
    given = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(given):
        return float(given)
    now_s = time.time() if now_s is None else now_s
    until_s = _http_date_s(given, now_s)
    if until_s is None:
        return 0.0
    sent_s = _http_date_s(headers.get("date", ""), now_s)
    return max(0.0, until_s - (now_s if sent_s is None else sent_s))


def _http_date_s(text: str, now_s: float) -> float | None:
    """Return the moment of a date in a header (RFC 9110, 5.6.7) in seconds since 1970; None if it is none.

    It is in UTC in each of the three forms. `now_s` is the present, by which a year of two digits is read.
    """
    found = next((match for form in _FORMS if (match := form.fullmatch(text.strip()))), None)
    if found is None:
        return None
    # The import is not needed for the usual answer, which has seconds or no such header.
    from datetime import UTC, datetime

    fields = found.groupdict()
    month, rest = divmod(_MONTHS.find(fields["month"]), 3)
    year = int(fields["year"])
    if year < 100:
        present = time.gmtime(now_s).tm_year
        year += present - present % 100
        if year > present + _YEARS_AHEAD:
            year -= 100
    clock = (int(fields["hour"]), int(fields["minute"]), min(int(fields["second"]), 59))  # 60: a leap second
    try:
        moment = datetime(year, 0 if rest else month + 1, int(fields["day"]), *clock, tzinfo=UTC)
    except ValueError:
        return None
    zone = fields.get("zone") or "+0000"
    return moment.timestamp() - int(zone[0] + "1") * (int(zone[1:3]) * 3600 + int(zone[3:]) * 60)


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
