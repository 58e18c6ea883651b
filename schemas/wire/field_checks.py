"""Checks of single fields that several kinds of records share, and the version of the wire format."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

SCHEMA_VERSION: Final = 1
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z", re.ASCII).fullmatch


def has_control_characters(text: str) -> bool:
    """Whether `text` holds a C0 or C1 control character or DEL (also newline and tab)."""
    return not text.isprintable() and any(c < " " or "\x7f" <= c <= "\x9f" for c in text)


def is_utc_timestamp(text: str) -> bool:
    """Whether `text` is a date and time by ISO 8601 in the extended format, with seconds and `Z`."""
    if _TIMESTAMP(text) is None:
        return False
    try:
        # The form is right; this tells whether there is such a day.
        datetime.fromisoformat(text[:19])
    except ValueError:
        return False
    return True
