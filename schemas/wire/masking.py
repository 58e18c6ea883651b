"""Masks for secrets and unsafe text in a record's body (CM-05, JE-04), for the ledger and all views."""

from __future__ import annotations

import re
from typing import Any, Final

from schemas.wire.strict_json import canonical
from schemas.wire.unsafe_text import unsafe_pattern

MASK: Final = "[masked]"
DETAIL: Final = "detail"
AUTH_TOKEN: Final = "data.auth_token"  # noqa: S105  a field's name
WHOLE_VALUE: Final = "value"
# In bytes that are not JSON, an escape or another encoding may hide a word or a path (UTF-16 has zero bytes).
# A backslash or a zero byte is therefore enough to mask them.
_MAY_HIDE: Final = re.compile(rb"auth_token|\\|\0", re.IGNORECASE)


def carries_token(document: dict[str, Any]) -> bool:
    """Return whether a decoded event has the field `data.auth_token`, of any type."""
    data = document.get("data")
    return type(data) is dict and "auth_token" in data


def mask_event(document: dict[str, Any]) -> tuple[str | None, bytes | None]:
    """Return the names of the masked fields, joined by commas, and the masked event as canonical JSON.

    Returns `(None, None)` when nothing in the decoded event needs a mask.
    """
    detail = document.get("detail")
    # The fold rejects a detail that is not text as malformed. Its content may be secret all the same.
    unsafe = unsafe_pattern(detail) is not None if type(detail) is str else isinstance(detail, dict | list)
    token = carries_token(document)
    if not unsafe and not token:
        return None, None
    shown = dict(document)
    names = []
    if unsafe:
        shown["detail"] = MASK
        names.append(DETAIL)
    if token:
        shown["data"] = {**document["data"], "auth_token": MASK}
        names.append(AUTH_TOKEN)
    return ",".join(names), canonical(shown)


def mask_opaque(value: bytes | None) -> tuple[str | None, bytes | None]:
    """Return `value` and a replacement for bytes that are not a readable event but may contain a secret.

    Such bytes are masked as a whole: the result is `("value", b"[masked] <size> bytes")`. Returns `(None,
    None)` when they need no mask or when there is no value.
    """
    if value is None:
        return None, None
    text = value.decode("utf-8", "replace")
    if _MAY_HIDE.search(value) is None and unsafe_pattern(text) is None:
        return None, None
    return WHOLE_VALUE, f"{MASK} {len(value)} bytes".encode("ascii")
