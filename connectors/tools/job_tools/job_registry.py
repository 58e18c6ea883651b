"""Registration and cancellation of jobs by records appended to the log (JE-10, JE-12), without the gateway."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pydantic import ValidationError

from connectors.log.publisher import Publisher
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.job.job_registry import BrokerOverlay, JobCancellation, JobRegistration
from schemas.wire.partitions import Position
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import first_fault
from trunkline_agent.errors import UsageError
from trunkline_agent.wire.ids import is_job_id, new_job_id
from trunkline_agent.wire.signing import new_secret

_DOOR = "cli"


@dataclass(frozen=True)
class RegisteredJob:
    """A job whose registration is in the log at `position`. `secret` is its secret in clear text."""

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
    """Append a job's registration to the log, wait until Kafka has stored it, and return the job.

    Whether the job then exists is decided when the record is settled: another registration with the same id is
    rejected.

    Args:
        publisher: appends the record.
        keyring: seals the job's secret.
        description: the job's text for the agent that does it.
        session: the only session that may pick the job; None: any session.
        broker: the broker that the job's events come from; None: the common one.
        principal: the principal that the record names as its author.
        job_id: the job's id; None: a new random id.
        secret: the job's secret; None: a new random secret.

    Raises:
        UsageError: a field is invalid.
        BackboneUnreachable: Kafka has not stored the record in time.
    """
    chosen_id, chosen_secret = job_id or new_job_id(), secret or new_secret()
    sealed = keyring.seal(chosen_secret.encode(), job_secret_purpose(chosen_id))
    make = partial(JobRegistration, job_id=chosen_id, description=description, sealed_secret=sealed)
    record = _valid(lambda: make(session=session, broker=broker).record(door=_DOOR, principal=principal))
    return RegisteredJob(chosen_id, chosen_secret, publisher.append(record).result())


def cancel_job(
    publisher: Publisher, job_id: str, *, reason: str = "", request_id: str | None = None
) -> Position:
    """Append a job's cancellation to the log, wait until Kafka has stored it, and return the record's position.

    Whether the job is then cancelled is decided when the record is settled: an unknown or ended job is not.

    Args:
        publisher: appends the record.
        job_id: the job.
        reason: why the job is cancelled, a short text that may be empty.
        request_id: a repeated cancellation with the same id is a duplicate; None: a new id.

    Raises:
        UsageError: a field is invalid.
        BackboneUnreachable: Kafka has not stored the record in time.
    """
    if not is_job_id(job_id):
        raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
    request = request_id or str(uuid.uuid4())
    make = partial(JobCancellation, job_id=job_id, reason=reason, request_id=request)
    return publisher.append(_valid(lambda: make().record(door=_DOOR, principal="operator"))).result()


def _valid(make: Callable[[], OutgoingRecord]) -> OutgoingRecord:
    try:
        return make()
    except ValidationError as error:
        raise UsageError(first_fault(error)) from None
