"""Checks of single fields that several kinds of records share, and the version of the wire format."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

SCHEMA_VERSION: Final = 1
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z", re.ASCII).fullmatch


def has_control_characters(text: str) -> bool:
    """Return whether `text` contains a C0 or C1 control character or DEL. Newline and tab count, too."""
    return not text.isprintable() and any(c < " " or "\x7f" <= c <= "\x9f" for c in text)


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
