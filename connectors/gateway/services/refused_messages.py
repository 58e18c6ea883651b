"""The recipient and the type of a refused message, as part of the recorded reason (HH-08).

The reason is the only text of a refusal's record that describes the request. Because it starts with both, the
log, the ledger and the audit log of every gateway have them.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

from schemas.wire.field_checks import has_control_characters
from schemas.wire.ids import is_name
from schemas.wire.wire_body import NOTE_LIMIT

_KIND_LIMIT: Final = 128
# The forms of this project's tokens: a task's (a UUID) and a principal's (32 bytes in URL-safe base64).
_MAY_BE_TOKEN: Final = re.compile(
    r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}|[A-Za-z0-9_-]{43}", re.IGNORECASE
).search
_ABOUT: Final = re.compile(
    r"message(?: to (?P<recipient>[A-Za-z0-9][A-Za-z0-9._-]*))?"
    r'(?: of type (?P<kind>"(?:[^"\\]|\\.)*"))?: (?P<why>.*)',
    re.DOTALL,
).fullmatch


class RefusedMessage(NamedTuple):
    """A refused message. `recipient` and `kind` are None when they could not be read."""

    recipient: str | None
    kind: str | None
    why: str


def why_refused(envelope: Any, why: str) -> str:
    """Return `why` after the recipient and the type, such as `message to bo of type "note": …`.

    A name that may be a token in the wrong place is left out, because no part of a token may be recorded.

    Args:
        envelope: The decoded body of the request.
        why: The reason of the refusal. The result has at most 500 characters.
    """
    fields = envelope if isinstance(envelope, dict) else {}
    recipient, kind = fields.get("recipient"), fields.get("type")
    to = f" to {recipient}" if _is_recipient(recipient) else ""
    of_type = f" of type {json.dumps(kind, ensure_ascii=False)}" if _is_kind(kind) else ""
    return f"message{to}{of_type}: {why}"[:NOTE_LIMIT] if to or of_type else why


def read_refused(why: str) -> RefusedMessage:
    """Parse the result of `why_refused`."""
    found = _ABOUT(why)
    if found is None:
        return RefusedMessage(None, None, why)
    kind = found["kind"]
    return RefusedMessage(found["recipient"], None if kind is None else json.loads(kind), found["why"])


def _is_recipient(recipient: object) -> bool:
    return isinstance(recipient, str) and is_name(recipient) and _MAY_BE_TOKEN(recipient) is None


def _is_kind(kind: object) -> bool:
    if not isinstance(kind, str) or len(kind) > _KIND_LIMIT or _MAY_BE_TOKEN(kind) is not None:
        return False
    return not has_control_characters(kind.replace("\n", "").replace("\t", ""))
