"""Registers and cancels jobs (JE-10, JE-12): what the command line and the demo, later the hub, do."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ValidationError

from connectors.log.publisher import Position, Publisher
from schemas.errors import UsageError
from schemas.keys.sealing import Keyring
from schemas.streams.job.job_registry import BrokerOverlay, cancellation_record, registration_record
from schemas.wire.ids import is_job_id, new_job_id
from schemas.wire.signing import new_secret
from schemas.wire.wire_body import first_fault


@dataclass(frozen=True)
class RegisteredJob:
    """A job that is in the log. The secret is told once; the log has it sealed."""

    job_id: str
    secret: str = field(repr=False)
    position: Position


def register_job(
    publisher: Publisher,
    keyring: Keyring,
    description: str,
    *,
    session: str | None = None,
    broker: BrokerOverlay | None = None,
    door: str = "cli",
    principal: str = "operator",
    timeout_s: float | None = None,
    job_id: str | None = None,
    secret: str | None = None,
) -> RegisteredJob:
    """Register a job and wait for Kafka. Raises UsageError for a bad field, BackboneUnreachable.

    `job_id` and `secret` are made unless they are given. `timeout_s` None: the producer's delivery timeout.
    """
    chosen_id, chosen_secret = job_id or new_job_id(), secret or new_secret()
    try:
        record = registration_record(
            chosen_id,
            chosen_secret,
            description,
            keyring,
            session=session,
            broker=broker,
            door=door,
            principal=principal,
        )
    except ValidationError as error:
        raise _usage(error) from None
    return RegisteredJob(chosen_id, chosen_secret, publisher.append(record).result(timeout_s))


def cancel_job(
    publisher: Publisher,
    job_id: str,
    *,
    reason: str = "",
    request_id: str | None = None,
    door: str = "cli",
    principal: str = "operator",
    timeout_s: float | None = None,
) -> Position:
    """Put the cancellation of a job into the log and wait for Kafka; the fold decides what it does.

    The same `request_id` again is the same cancellation. Raises UsageError for a bad field,
    BackboneUnreachable.
    """
    if not is_job_id(job_id):
        raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
    try:
        record = cancellation_record(
            job_id, reason=reason, request_id=request_id, door=door, principal=principal
        )
    except ValidationError as error:
        raise _usage(error) from None
    return publisher.append(record).result(timeout_s)


def _usage(error: ValidationError) -> UsageError:
    return UsageError(first_fault(error))
