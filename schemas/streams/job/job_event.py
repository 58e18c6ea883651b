"""The form of a job event (JE-02): a pydantic model for publishers, and a faster check for the fold.

`JobEvent` and `event_fault` decide alike; a property test compares them. `event_fault` takes about a
microsecond.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.wire.wire_body import UtcTime
from trunkline_agent.wire.field_checks import has_control_characters, is_utc_timestamp
from trunkline_agent.wire.ids import is_job_id
from trunkline_agent.wire.strict_json import INT_MAX

JOB_EVENT: Final = "job.event"

DETAIL_LIMIT: Final = 500
STARTED: Final = "started"
PROGRESS: Final = "progress"
PERMISSION_REQUIRED: Final = "permission_required"
COMPLETED: Final = "completed"
ERROR: Final = "error"
EVENTS: Final = (STARTED, PROGRESS, PERMISSION_REQUIRED, COMPLETED, ERROR)
TERMINAL_EVENTS: Final = (COMPLETED, ERROR)
_EVENT_SET: Final = frozenset(EVENTS)
# The check below as a regular expression, for readers of the JSON schema.
_PRINTABLE: Final = {"pattern": r"^[^\x00-\x1f\x7f-\x9f]*$"}


def _printable(text: str) -> str:
    if has_control_characters(text):
        raise ValueError("holds a control character")
    return text


class JobEvent(BaseModel):
    """Body of `job.event`: one event of a job, as an agent publishes it.

    Unknown keys are kept and are part of the signed bytes. The signature is in `data.hmac_sig`.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    # Literal[1] would accept `true`.
    schema_version: Annotated[int, Field(ge=1, le=1, json_schema_extra={"const": 1})]
    """Version of the form: 1."""
    seq: Annotated[int, Field(ge=1, le=INT_MAX)]
    """Number of the event within its job, from 1."""
    job_id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}\z", json_schema_extra={"pattern": "^[0-9a-f]{8}$"})]
    """Id of the job, 8 hex digits."""
    event: Literal["started", "progress", "permission_required", "completed", "error"]
    """Kind of the event. `completed` and `error` end the job."""
    timestamp: UtcTime
    """Time of the event by the sender's clock, in UTC, such as `2026-01-31T12:00:00Z`."""
    detail: Annotated[
        str, Field(max_length=DETAIL_LIMIT, json_schema_extra=_PRINTABLE), AfterValidator(_printable)
    ]
    """Remark for people. A path, a secret or `NAME=value` in it is masked."""
    data: dict[str, Any]
    """Anything, with the signature in `hmac_sig`."""


def event_fault(event: dict[str, Any]) -> str | None:
    """Check the fields of a decoded job event, except `schema_version`, which the fold checks before.

    Returns `field: explanation` for the first invalid field, or `None` if all are valid. Never raises. The
    check decides the same as the model `JobEvent` in less time.
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
