"""The durations of a message, until it is delivered and until it expires: one rule for all doors."""

from __future__ import annotations

# No import: the file queue has to start quickly.
DURATION_S_LEAST = 0.001
DURATION_S_MOST = 366 * 24 * 3600
EXPIRES_FIRST = "the message would expire before it is delivered"
UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TEXT_MOST = 10**9


def is_duration(value: object) -> bool:
    """Return whether a value is a number of seconds from a millisecond to 366 days."""
    # Numbers that are not finite are outside.
    return type(value) in (int, float) and DURATION_S_LEAST <= value <= DURATION_S_MOST  # type: ignore[operator]


def expires_first(deliver_after: float | None, expires_in: float | None) -> bool:
    """Return whether a message would expire before it is delivered.

    Both are times from its posting, in the same unit. None means at once, and never.
    """
    return expires_in is not None and (deliver_after or 0) >= expires_in


def duration_s(text: str) -> float:
    """Return the seconds of a duration such as `90`, `0.5`, `90s`, `5m`, `2h` or `1d`, for argparse.

    Raises argparse.ArgumentTypeError for another form, and for 10^9 seconds or more.
    """
    number = text.rstrip("smhd")
    unit = text[len(number) :]
    whole, _, part = number.partition(".")
    # No float such as `1e3` or `nan`, and no digits of other scripts.
    is_number = number.isascii() and (whole + part).isdigit()
    if is_number and unit in UNIT_S and (found := float(number) * UNIT_S[unit]) < _TEXT_MOST:
        return found
    from argparse import ArgumentTypeError  # other callers of this module have no command line

    raise ArgumentTypeError(f"expected a time such as 30s, 5m, 2h or 1d, found {text[:40]!r}")
