"""Words for what a model refuses in a request or a file, without the input, which may be secret.

The fold has words of its own (`schemas/wire_body.py`): they are in rows of the ledger and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

_LENGTHS: Final = frozenset({"too_long", "too_short"})
# What pydantic calls a text whose characters another check has looked at.
_TEXT: Final = "Value"


def words_of(fault: Mapping[str, Any]) -> str:
    """Return pydantic's message for one fault; the length of a text is told in characters, not in items."""
    words = str(fault["msg"])
    if fault["type"] not in _LENGTHS:
        return words
    is_text = fault.get("ctx", {}).get("field_type") == _TEXT
    words = words.replace(" after validation", "")
    return words.replace(" items", " characters").replace(" item,", " character,") if is_text else words


def first_fault(error: ValidationError) -> str:
    """Return the first thing that a model refused, `field: reason`."""
    first = error.errors(include_input=False, include_url=False)[0]
    # The last part of an unknown key's place is the key, and that is input.
    place = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]
    return f"{'.'.join(str(part) for part in place) or 'body'}: {words_of(first)}"
