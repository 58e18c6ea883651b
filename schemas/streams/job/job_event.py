"""The form of a job event (JE-02) as a pydantic model, for the gateway's documents and for publishers.

The model and `trunkline_agent.wire.job_event.event_fault`, which the fold uses, decide alike; a property test
compares them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.wire.wire_body import UtcTime
from trunkline_agent.wire.field_checks import has_control_characters
from trunkline_agent.wire.job_event import DETAIL_LIMIT
from trunkline_agent.wire.strict_json import INT_MAX

JOB_EVENT: Final = "job.event"

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
