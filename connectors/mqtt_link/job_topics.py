"""The MQTT topics of jobs: `<prefix>/<job_id>/events` (JE-01) and `<prefix>/<job_id>/receipts` (JE-17)."""

from __future__ import annotations

from typing import Final

from schemas.wire.ids import JOB, is_job_id, stream_key

_EVENTS: Final = "/events"
_RECEIPTS: Final = "/receipts"


def events_topic(prefix: str, job_id: str) -> str:
    """The topic that a job's events are published on. Raises ValueError for what is no job id."""
    return _topic(prefix, job_id, _EVENTS)


def receipts_topic(prefix: str, job_id: str) -> str:
    """The topic that the receipts of a job's events come back on. Raises ValueError for what is no job id."""
    return _topic(prefix, job_id, _RECEIPTS)


def events_filter(prefix: str) -> str:
    """The subscription that sees all events, also those under ids that are none."""
    return f"{prefix}/+{_EVENTS}"


def job_id_of(prefix: str, topic: str) -> str | None:
    """The job id in an events topic, None when what stands there is no job id."""
    name = topic.removeprefix(prefix + "/").removesuffix(_EVENTS)
    return name if is_job_id(name) and topic == f"{prefix}/{name}{_EVENTS}" else None


def _topic(prefix: str, job_id: str, end: str) -> str:
    stream_key(JOB, job_id)
    return f"{prefix}/{job_id}{end}"
