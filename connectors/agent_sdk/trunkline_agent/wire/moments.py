"""Moments as ISO 8601 texts in UTC, and as microseconds since 1970 UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001  all times here are UTC
_SECOND_US: Final = 1_000_000
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z", re.ASCII).fullmatch


@lru_cache(256)
def iso_second(seconds: int) -> str:
    """Format a time in seconds since 1970 UTC as ISO 8601 without its zone, such as `2026-01-31T12:00:00`.

    Raises ValueError if the year is above 9999.
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:-6]


def iso_moment(moment_us: int) -> str:
    """Format a time in microseconds since 1970 UTC as ISO 8601, such as `2026-01-31T12:00:00.250Z`.

    The text has three or six fractional digits. Raises ValueError if the year is above 9999.
    """
    seconds, micros = divmod(moment_us, _SECOND_US)
    millis, rest = divmod(micros, 1000)
    fraction = f"{micros:06d}" if rest else f"{millis:03d}"
    return f"{iso_second(seconds)}.{fraction}Z"


def is_utc_timestamp(text: str) -> bool:
    """Return whether `text` is an existing date and time in UTC such as `2026-11-21T10:00:00Z` (ISO 8601).

    A fraction of a second with 1 to 9 digits is allowed. The `Z` is required.
    """
    if _TIMESTAMP(text) is None:
        return False
    try:
        # The form is right. This line rejects days that do not exist, such as February 30.
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def moment_of(text: str) -> int:
    """Return a time in microseconds since 1970 UTC, rounded up: the first of them at which it has come.

    `text` is ISO 8601 in UTC with seconds and `Z`, such as `2026-11-21T10:00:00Z`, checked by
    `is_utc_timestamp`.
    """
    whole = datetime.fromisoformat(text[:19]) - _EPOCH
    # A time has up to nine fractional digits, which are nanoseconds.
    fraction_ns = int(text[20:-1].ljust(9, "0"))
    return (whole.days * 86_400 + whole.seconds) * _SECOND_US - -fraction_ns // 1000


def has_come(text: str, now_us: int) -> bool:
    """Return whether a point in time has passed. The result is true if it is exactly now.

    `text` is a time as `moment_of` takes it, and `now_us` the present in microseconds since 1970 UTC.
    """
    return moment_of(text) <= now_us
