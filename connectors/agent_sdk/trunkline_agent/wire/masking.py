"""Masks that hide secrets and unsafe text of a record's body in the ledger and the views (CM-05, JE-04)."""

from __future__ import annotations

import re
from typing import Any, Final

from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.unsafe_text import unsafe_pattern

MASK: Final = "[masked]"
DETAIL: Final = "detail"
AUTH_TOKEN: Final = "data.auth_token"  # noqa: S105  a field's name
WHOLE_VALUE: Final = "value"
# In bytes that are not JSON, an escape or another encoding may hide a word or a path (UTF-16 has zero bytes).
# A backslash or a zero byte is therefore enough to mask them.
_MAY_HIDE: Final = re.compile(rb"auth_token|\\|\0", re.IGNORECASE)


def carries_token(document: dict[str, Any]) -> bool:
    """Return whether the decoded body of an event has the field `data.auth_token`, with a value of any type.

    This field is the sender's own secret. The fold rejects such an event as `secret_in_event`.
    """
    data = document.get("data")
    return type(data) is dict and "auth_token" in data


def mask_event(document: dict[str, Any]) -> tuple[str | None, bytes | None]:
    """Mask an unsafe `detail` and the field `data.auth_token` of a decoded event, in a copy of it.

    The mask is the text `[masked]`. A `detail` is unsafe if `unsafe_pattern` finds a path or a secret in it, or
    if it is an object or array. `document` itself does not change.

    Returns:
        The names of the masked fields, joined by commas, and the masked event as canonical JSON. `(None, None)`
        if the event has nothing to mask.
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
    """Decide whether to mask bytes that could not be decoded as an event but may contain a secret.

    Args:
        value: the value of a Kafka record, or `None` if the record has none.

    Returns:
        `("value", b"[masked] <size> bytes")` if the bytes may contain a token, a path or another unsafe text:
        the whole value must be hidden. `(None, None)` if it may be shown or there is no value.
    """
    if value is None:
        return None, None
    text = value.decode("utf-8", "replace")
    if _MAY_HIDE.search(value) is None and unsafe_pattern(text) is None:
        return None, None
    return WHOLE_VALUE, f"{MASK} {len(value)} bytes".encode("ascii")
