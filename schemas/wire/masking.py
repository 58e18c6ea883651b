"""What of a body may be shown (CM-05, JE-04): masks for the ledger's `value` and for all views."""

from __future__ import annotations

import re
from typing import Any, Final

from schemas.wire.strict_json import canonical
from schemas.wire.unsafe_text import unsafe_pattern

MASK: Final = "[masked]"
DETAIL: Final = "detail"
AUTH_TOKEN: Final = "data.auth_token"  # noqa: S105  a field's name
WHOLE_VALUE: Final = "value"
# In bytes that could not be read as JSON an escape may hide a word or a path, and so may another encoding
# (UTF-16 has zero bytes): either is reason enough.
_MAY_HIDE: Final = re.compile(rb"auth_token|\\|\0", re.IGNORECASE)


def carries_token(document: dict[str, Any]) -> bool:
    """Whether a decoded event carries `data.auth_token`, whatever its type."""
    data = document.get("data")
    return type(data) is dict and "auth_token" in data


def mask_event(document: dict[str, Any]) -> tuple[str | None, bytes | None]:
    """`(what was masked, the bytes to show)` of a decoded event; `(None, None)` when all may be shown."""
    detail = document.get("detail")
    # A detail that is no text is refused as malformed; what it holds is nobody's business either.
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
    """The same for bytes that are no readable event: shown whole, or not at all."""
    if value is None:
        return None, None
    text = value.decode("utf-8", "replace")
    if _MAY_HIDE.search(value) is None and unsafe_pattern(text) is None:
        return None, None
    return WHOLE_VALUE, f"{MASK} {len(value)} bytes".encode("ascii")
