"""The form of a job event (JE-02): its constants, and the check that publishers and the fold share.

The check takes about a microsecond. The pydantic model `JobEvent` of the product decides the same; a property
test compares the two. Other kinds of records share the checks of single fields.
"""

from __future__ import annotations

from typing import Any, Final

from trunkline_agent.wire.ids import is_job_id
from trunkline_agent.wire.moments import is_utc_timestamp
from trunkline_agent.wire.strict_json import INT_MAX

SCHEMA_VERSION: Final = 1
DETAIL_LIMIT: Final = 500
STARTED: Final = "started"
PROGRESS: Final = "progress"
PERMISSION_REQUIRED: Final = "permission_required"
COMPLETED: Final = "completed"
ERROR: Final = "error"
EVENTS: Final = (STARTED, PROGRESS, PERMISSION_REQUIRED, COMPLETED, ERROR)
TERMINAL_EVENTS: Final = (COMPLETED, ERROR)
_EVENT_SET: Final = frozenset(EVENTS)


def has_control_characters(text: str) -> bool:
    """Return whether `text` contains a C0 or C1 control character or DEL. Newline and tab count, too."""
    return not text.isprintable() and any(c < " " or "\x7f" <= c <= "\x9f" for c in text)


def event_fault(event: dict[str, Any]) -> str | None:
    """Check the fields of a decoded job event, except `schema_version`, which the fold checks before.

    Returns `field: explanation` for the first invalid field, or `None` if all are valid. Never raises.
    """
    get = event.get
    seq = get("seq")
    if type(seq) is not int or not 1 <= seq <= INT_MAX:
        return "seq: expected an integer from 1"
    if not is_job_id(get("job_id")):
        return "job_id: expected 8 lower-case hex digits"
    kind = get("event")
    if type(kind) is not str or kind not in _EVENT_SET:
        return "event: expected one of " + ", ".join(EVENTS)
    timestamp = get("timestamp")
    if type(timestamp) is not str or not is_utc_timestamp(timestamp):
        return "timestamp: expected ISO 8601 in UTC with Z"
    detail = get("detail")
    if type(detail) is not str or len(detail) > DETAIL_LIMIT:
        return f"detail: expected text of at most {DETAIL_LIMIT} characters"
    if has_control_characters(detail):
        return "detail: holds a control character"
    if type(get("data")) is not dict:
        return "data: expected an object"
    return None
