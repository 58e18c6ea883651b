"""The records that register and cancel a job (JE-10, JE-12): wire models and how a door makes the records."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from schemas.ids import JOB, is_name, stream_key
from schemas.job_event import has_control_characters
from schemas.record import JOB_CANCELLED, JOB_REGISTERED, OutgoingRecord, content_id
from schemas.sealing import Keyring, job_secret_purpose
from schemas.strict_json import canonical

DESCRIPTION_LIMIT: Final = 4000


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError("not a name: letters, digits, '.', '_', '-', at most 128, first a letter or digit")
    return text


def _printable(text: str) -> str:
    if has_control_characters(text.replace("\n", "").replace("\t", "")):
        raise ValueError("holds a control character")
    return text


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1] = 1
    job_id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}\z")]


class BrokerOverlay(BaseModel):
    """Broker settings of one job, over those of the environment (JE-13). The password is sealed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    host: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    tls: bool | None = None
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    username: str | None = None
    sealed_password: str | None = None


class JobRegistration(_Body):
    """Body of `job.registered`. `sealed_secret` opens for `job-secret/<job_id>` only."""

    description: Annotated[str, Field(max_length=DESCRIPTION_LIMIT), AfterValidator(_printable)]
    session: Annotated[str, AfterValidator(_name)] | None = None
    broker: BrokerOverlay | None = None
    sealed_secret: str


class JobCancellation(_Body):
    """Body of `job.cancelled`. The same `request_id` again is the same cancellation."""

    request_id: Annotated[str, AfterValidator(_name)]
    reason: Annotated[str, Field(max_length=500), AfterValidator(_printable)] = ""


def body_fault(model: type[BaseModel], body: dict[str, Any]) -> str | None:
    """What is wrong with a body, by its model, in words without the input; None when nothing is."""
    try:
        model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        unknown_key = first["type"] == "extra_forbidden"
        where = [str(part) for part in (first["loc"][:-1] if unknown_key else first["loc"])]
        return f"{'.'.join(where) or 'body'}: {first['msg']}"
    return None


def registration_record(
    job_id: str,
    secret: str,
    description: str,
    keyring: Keyring,
    *,
    session: str | None = None,
    broker: BrokerOverlay | None = None,
    door: str = "cli",
    principal: str = "operator",
) -> OutgoingRecord:
    """The record that registers a job. Raises pydantic.ValidationError for a bad description or session."""
    body = JobRegistration(
        job_id=job_id,
        description=description,
        session=session,
        broker=broker,
        sealed_secret=keyring.seal(secret.encode("utf-8"), job_secret_purpose(job_id)),
    )
    value = canonical(body.model_dump(mode="json"))
    return OutgoingRecord(
        stream=stream_key(JOB, job_id),
        ce_id=content_id(JOB_REGISTERED.encode(), value),
        door=door,
        principal=principal,
        type=JOB_REGISTERED,
        value=value,
    )


def cancellation_record(
    job_id: str,
    *,
    reason: str = "",
    request_id: str | None = None,
    door: str = "cli",
    principal: str = "operator",
) -> OutgoingRecord:
    """The record that cancels a job. Raises pydantic.ValidationError for a bad reason or request id."""
    body = JobCancellation(job_id=job_id, reason=reason, request_id=request_id or str(uuid.uuid4()))
    value = canonical(body.model_dump(mode="json"))
    return OutgoingRecord(
        stream=stream_key(JOB, job_id),
        ce_id=content_id(JOB_CANCELLED.encode(), f"{door}/{principal}".encode(), body.request_id.encode()),
        door=door,
        principal=principal,
        type=JOB_CANCELLED,
        value=value,
    )
