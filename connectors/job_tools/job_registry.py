"""Register and cancel jobs by records in the log (JE-10, JE-12), without the gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pydantic import ValidationError

from connectors.log.publisher import Position, Publisher
from schemas.errors import UsageError
from schemas.keys.sealing import Keyring
from schemas.streams.job.job_registry import BrokerOverlay, cancellation_record, registration_record
from schemas.wire.ids import is_job_id, new_job_id
from schemas.wire.record import OutgoingRecord
from schemas.wire.signing import new_secret
from schemas.wire.wire_body import first_fault

_DOOR = "cli"


@dataclass(frozen=True)
class RegisteredJob:
    """A job that is in the log. The log has its secret only sealed."""

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
    principal: str = "operator",
    job_id: str | None = None,
    secret: str | None = None,
) -> RegisteredJob:
    """Register a job and wait for Kafka. A new id and secret are made unless they are given.

    Raises UsageError for an invalid field, BackboneUnreachable.
    """
    chosen_id, chosen_secret = job_id or new_job_id(), secret or new_secret()
    register = partial(registration_record, session=session, broker=broker, door=_DOOR, principal=principal)
    record = _valid(lambda: register(chosen_id, chosen_secret, description, keyring))
    return RegisteredJob(chosen_id, chosen_secret, publisher.append(record).result())


def cancel_job(
    publisher: Publisher, job_id: str, *, reason: str = "", request_id: str | None = None
) -> Position:
    """Append the cancellation of a job and wait for Kafka. The fold decides whether it takes effect.

    The same `request_id` again is the same cancellation. Raises UsageError for an invalid field,
    BackboneUnreachable.
    """
    if not is_job_id(job_id):
        raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
    cancel = partial(cancellation_record, request_id=request_id, door=_DOOR, principal="operator")
    return publisher.append(_valid(lambda: cancel(job_id, reason=reason))).result()


def _valid(make: Callable[[], OutgoingRecord]) -> OutgoingRecord:
    try:
        return make()
    except ValidationError as error:
        raise UsageError(first_fault(error)) from None
