"""Records for the Spark tests, put into Kafka as they are, also those that no door would let in."""

from __future__ import annotations

from collections.abc import Iterable

from connectors.log.publisher import Publisher
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_EVENT, JobRegistration
from schemas.wire.record import OutgoingRecord
from tests.raw_records import Raw
from tests.raw_records import append_raw as append_records
from tests.schemas.job_records import SECRET, signed
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.strict_json import canonical


def registration(job_id: str, keyring: Keyring) -> OutgoingRecord:
    """The record that registers a job whose secret is SECRET."""
    return JobRegistration(
        sealed_secret=keyring.seal(SECRET.encode(), job_secret_purpose(job_id)),
        job_id=job_id,
        description="test the settling",
    ).record(door="cli", principal="operator")


def event(job_id: str, seq: int, kind: str = "progress", detail: str = "going on") -> OutgoingRecord:
    """A signed event as the bridge would append it."""
    return raw_event(job_id, canonical(signed(seq, kind, SECRET, job_id=job_id, detail=detail)))


def raw_event(job_id: str, value: bytes) -> OutgoingRecord:
    """Any bytes as an event of a job."""
    ce_id = content_id(job_id.encode(), value)
    return OutgoingRecord(f"job/{job_id}", ce_id, "mqtt", "unverified", JOB_EVENT, value)


def append_all(settings: Settings, records: Iterable[OutgoingRecord]) -> int:
    """Append records through the publisher and wait until Kafka has them; returns how many."""
    with Publisher(settings) as publisher:
        waiting = [publisher.append(record) for record in records]
        for future in waiting:
            future.result(30)
    return len(waiting)


def append_raw(
    settings: Settings, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
) -> None:
    """Append one record as it is, past all doors."""
    append_records(settings, [Raw(key, value, [*headers])])
