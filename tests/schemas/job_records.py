"""Records of jobs as tests make them: signed, forged, in any notation, with any headers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from schemas.fold.settled import Settled
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.wire.record import STANDARD_HEADERS, Record
from trunkline_agent.wire.signing import sign_event

JOB_ID: Final = "ab12cd34"
SECRET: Final = "a secret of the tests"
OTHER_SECRET: Final = "another secret of the tests"
KEYRING: Final = Keyring({"k1": bytes(range(32))}, "k1")
TOPIC: Final = "trunk.events"
START_US: Final = 1_800_000_000_000_000
SENDER: Final = "mqtt/unverified"


def sealed(secret: str = SECRET, job_id: str = JOB_ID) -> str:
    """A job's secret as its registration carries it."""
    return KEYRING.seal(secret.encode("utf-8"), job_secret_purpose(job_id))


def registration(**changed: Any) -> dict[str, Any]:
    """The body of a registration, with fields changed."""
    body = {
        "schema_version": 1,
        "job_id": JOB_ID,
        "description": "count the stars",
        "sealed_secret": sealed(),
    }
    return {**body, **changed}


def cancellation(request_id: str = "r1", **changed: Any) -> dict[str, Any]:
    """The body of a cancellation, with fields changed."""
    return {"schema_version": 1, "job_id": JOB_ID, "request_id": request_id, **changed}


def rotation(
    request_id: str = "t1", secret: str = OTHER_SECRET, overlap_ms: int = 60_000, **changed: Any
) -> dict[str, Any]:
    """The body that gives the job a new secret, with fields changed."""
    body = {"job_id": JOB_ID, "request_id": request_id, "sealed_secret": sealed(secret)}
    return {"schema_version": 1, **body, "overlap_ms": overlap_ms, **changed}


def pick(session: str = "s1", **changed: Any) -> dict[str, Any]:
    """The body of a pick, with fields changed."""
    return {"schema_version": 1, "job_id": JOB_ID, "session": session, **changed}


def event(seq: int = 1, kind: str = "progress", /, **changed: Any) -> dict[str, Any]:
    """An event without a signature, with fields changed."""
    body = {
        "schema_version": 1,
        "seq": seq,
        "job_id": JOB_ID,
        "event": kind,
        "timestamp": "2026-11-21T10:00:00Z",
        "detail": "3/10",
        "data": {},
    }
    return {**body, **changed}


def signed(seq: int = 1, kind: str = "progress", /, secret: str = SECRET, **changed: Any) -> dict[str, Any]:
    """An event with its signature, made after the fields were changed."""
    return sign_event(event(seq, kind, **changed), secret)


# The same document as different senders write it. None of them changes what is signed.
NOTATIONS: Final[dict[str, Callable[[Any], str]]] = {
    "canonical": lambda d: json.dumps(d, sort_keys=True, separators=(",", ":"), ensure_ascii=False),
    "spaced": lambda d: json.dumps(d, ensure_ascii=False),
    "escaped": json.dumps,
    "indented": lambda d: json.dumps(d, indent=2, sort_keys=True),
    "backwards": lambda d: json.dumps(dict(reversed(d.items())), separators=(",", ":"), ensure_ascii=False),
}


def written(document: Any, notation: str = "canonical") -> bytes:
    """`document` as bytes, in one of the notations."""
    return NOTATIONS[notation](document).encode("utf-8")


def make_record(
    value: bytes | None,
    record_type: str = JOB_EVENT,
    *,
    key: bytes | None = b"job/" + JOB_ID.encode(),
    ce_id: str = "id-1",
    sender: str = SENDER,
    offset: int = 0,
    more_headers: Sequence[tuple[str, bytes | None]] = (),
) -> Record:
    """A Kafka record with the standard headers and `more_headers` after them."""
    texts = ("1.0", ce_id, sender, record_type, "2026-11-21T10:00:00.000Z", None, "application/json")
    values = tuple(key if text is None else text.encode("utf-8") for text in texts)
    names = STANDARD_HEADERS + tuple(name for name, _ in more_headers)
    values += tuple(raw for _, raw in more_headers)
    return Record(TOPIC, 1, offset, START_US + offset * 1000, key, value, names, values)


def document_record(document: Any, record_type: str = JOB_EVENT, **changed: Any) -> Record:
    """The record of a document in canonical notation."""
    return make_record(written(document), record_type, **changed)


def said(settled: Settled) -> tuple[str, str | None]:
    """Verdict and reason."""
    return settled.verdict, settled.reason
