"""Jobs that tests register by a record in the log, without a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.log.publisher import Publisher
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.job.job_registry import BrokerOverlay, JobRegistration
from schemas.wire.record import Position
from trunkline_agent.wire.ids import new_job_id
from trunkline_agent.wire.signing import new_secret


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
    broker: BrokerOverlay | None = None,
    secret: str | None = None,
) -> RegisteredJob:
    """Append a job's registration to the log, wait until Kafka has stored it, and return the job."""
    job_id, secret = new_job_id(), secret or new_secret()
    registration = JobRegistration(
        job_id=job_id,
        description=description,
        sealed_secret=keyring.seal(secret.encode(), job_secret_purpose(job_id)),
        broker=broker,
    )
    record = registration.record(door="cli", principal="operator")
    return RegisteredJob(job_id, secret, publisher.append(record).result())
