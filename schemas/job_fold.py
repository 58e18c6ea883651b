"""The fold of `job/<id>`: what a registration, an event or a cancellation does to a job (JE-06 to JE-08).

Two entries: `job`, written at registration, and `progress`, written by every accepted record. A finished
job keeps both as its tombstone, without the description.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, Final

import msgspec

from schemas import life_cycles as states
from schemas.entries import Entries
from schemas.job_event import COMPLETED, ERROR, STARTED
from schemas.masking import MASK, carries_token
from schemas.record import JOB_CANCELLED, JOB_EVENT, JOB_REGISTERED, Envelope, Record
from schemas.sealing import Keyring
from schemas.seq_memory import SeqMemory
from schemas.settled import REGISTRY_JOBS, Change, JobRow, Outcome, accepted, duplicate, rejected
from schemas.signing import SIGNATURE_FIELD, signed_bytes
from schemas.strict_json import canonical, canonical_plain
from schemas.verdicts import (
    AFTER_TERMINAL,
    BAD_SIGNATURE,
    ILLEGAL_TRANSITION,
    SECRET_IN_EVENT,
    SEQ_CONFLICT,
    TOO_LATE,
    UNKNOWN_STREAM,
)

ENTRY_VERSION: Final = 1
_JOB: Final = "job"
_PROGRESS: Final = "progress"
_STATUS_BY_EVENT: Final = {COMPLETED: states.COMPLETED, ERROR: states.ERROR}


class JobEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What registration said. `digest` tells a registration sent again from another one."""

    version: int
    description: str
    session: str | None
    broker: str | None
    sealed_secret: str
    registered_by: str
    registered_at: int
    digest: bytes


class ProgressEntry(msgspec.Struct, array_like=True, gc=False):
    """How far the job is. `cancelled_by`: CloudEvents id and content digest of what cancelled it."""

    version: int
    status: str
    seqs: SeqMemory
    started_at: int | None = None
    ended_at: int | None = None
    last_event: str | None = None
    last_detail: str | None = None
    events: int = 0
    cancelled_by: tuple[str, bytes] | None = None


_encode: Final = msgspec.msgpack.Encoder().encode
# An entry that registration wrote is read by every event of the job and never changed: decoded once.
_decode_job: Final = lru_cache(maxsize=20_000)(msgspec.msgpack.Decoder(JobEntry).decode)
_decode_progress: Final = msgspec.msgpack.Decoder(ProgressEntry).decode


def settle_job(
    record: Record,
    envelope: Envelope,
    job_id: str,
    body: dict[str, Any],
    plain: bool,
    masked: bool,
    entries: Entries,
    keyring: Keyring,
) -> Outcome:
    """Settle one record of the job's stream whose body passed the checks of its wire model.

    `plain`: the body is canonical and free of floats, so it can be written again quickly.
    `masked`: its detail is unsafe or it carries a token, and must not reach a view.
    """
    if envelope.type == JOB_REGISTERED:
        return _settle_registration(record, envelope, job_id, body, entries)
    raw_job, raw_progress = entries.get(_JOB), entries.get(_PROGRESS)
    if raw_job is None or raw_progress is None:
        return rejected(UNKNOWN_STREAM, "no job with this id was registered")
    job, progress = _decode_job(raw_job), _decode_progress(raw_progress)
    if envelope.type == JOB_CANCELLED:
        return _settle_cancellation(record, envelope, job_id, body, job, progress, entries)
    return _settle_event(record, job_id, body, plain, masked, job, progress, entries, keyring)


def _settle_registration(
    record: Record, envelope: Envelope, job_id: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    digest = _digest(body)
    known = entries.get(_JOB)
    if known is not None:
        status = _decode_progress(entries.get(_PROGRESS) or b"").status
        if _decode_job(known).digest == digest:
            return duplicate(status)
        return rejected(SEQ_CONFLICT, "a job with this id is registered already", status)
    job = JobEntry(
        version=ENTRY_VERSION,
        description=body["description"],
        session=body.get("session"),
        broker=None if body.get("broker") is None else canonical(body["broker"]).decode("utf-8"),
        sealed_secret=body["sealed_secret"],
        registered_by=f"{envelope.door}/{envelope.principal}",
        registered_at=record.logged_at_us,
        digest=digest,
    )
    progress = ProgressEntry(ENTRY_VERSION, states.PENDING, SeqMemory())
    entries.put(_JOB, _encode(job))
    entries.put(_PROGRESS, _encode(progress))
    return accepted(states.PENDING, _changes(job_id, job, progress))


def _settle_cancellation(
    record: Record,
    envelope: Envelope,
    job_id: str,
    body: dict[str, Any],
    job: JobEntry,
    progress: ProgressEntry,
    entries: Entries,
) -> Outcome:
    identity = (envelope.ce_id, _digest(body))
    if progress.cancelled_by == identity:
        return duplicate(progress.status)
    if progress.cancelled_by is not None and progress.cancelled_by[0] == envelope.ce_id:
        return rejected(SEQ_CONFLICT, "this request id cancelled the job with another reason", progress.status)
    if progress.status in states.JOB_TERMINAL:
        return rejected(AFTER_TERMINAL, f"the job is {progress.status}", progress.status)
    progress.status = states.CANCELLED
    progress.ended_at = record.logged_at_us
    progress.cancelled_by = identity
    return _keep(job_id, job, progress, entries, late=False)


def _settle_event(
    record: Record,
    job_id: str,
    event: dict[str, Any],
    plain: bool,
    masked: bool,
    job: JobEntry,
    progress: ProgressEntry,
    entries: Entries,
    keyring: Keyring,
) -> Outcome:
    status = progress.status
    signature = event["data"].get(SIGNATURE_FIELD)
    signer = keyring.job_signer(job.sealed_secret, job_id)
    if not signer.verifies(_to_sign(event, plain), signature):
        return rejected(BAD_SIGNATURE, "data.hmac_sig is missing or does not fit the job's secret", status)
    if masked and carries_token(event):
        return rejected(SECRET_IN_EVENT, "data.auth_token must never be sent", status)
    seq = event["seq"]
    # The signature is a keyed hash of the canonical content, so it tells contents apart.
    digest = bytes.fromhex(signature[:32])
    seen = progress.seqs.seen(seq, digest)
    if seen == "same":
        return duplicate(status)
    if seen == "other":
        return rejected(SEQ_CONFLICT, "this seq was settled with other content", status)
    if seen == "too_old":
        return rejected(TOO_LATE, "too far behind the newest seqs to tell whether it was settled", status)
    if status in states.JOB_TERMINAL:
        return rejected(AFTER_TERMINAL, f"the job is {status}", status)
    kind = event["event"]
    if kind == STARTED and seq != 1:
        return rejected(ILLEGAL_TRANSITION, "started must have seq 1", status)
    late = seq < progress.seqs.last
    progress.seqs.add(seq, digest)
    progress.events += 1
    if progress.started_at is None:
        progress.started_at = record.logged_at_us
    if not late:
        progress.last_event = kind
        progress.last_detail = MASK if masked else event["detail"]
    progress.status = _STATUS_BY_EVENT.get(kind, states.RUNNING)
    if progress.status != states.RUNNING:
        progress.ended_at = record.logged_at_us
    return _keep(job_id, job, progress, entries, late=late)


def _digest(body: dict[str, Any]) -> bytes:
    return hashlib.sha256(canonical(body)).digest()[:16]


def _to_sign(event: dict[str, Any], plain: bool) -> bytes:
    if not plain:
        return signed_bytes(event)
    data = event["data"]
    signature = data.pop(SIGNATURE_FIELD, None)
    content = canonical_plain(event)
    if signature is not None:
        data[SIGNATURE_FIELD] = signature
    return content


def _keep(job_id: str, job: JobEntry, progress: ProgressEntry, entries: Entries, *, late: bool) -> Outcome:
    entries.put(_PROGRESS, _encode(progress))
    if progress.status in states.JOB_TERMINAL:
        entries.put(_JOB, _encode(msgspec.structs.replace(job, description="")))
    return accepted(progress.status, _changes(job_id, job, progress), late=late)


def _changes(job_id: str, job: JobEntry, progress: ProgressEntry) -> tuple[Change, ...]:
    row = JobRow(
        job_id=job_id,
        status=progress.status,
        description=job.description,
        session=job.session,
        registered_by=job.registered_by,
        registered_at=job.registered_at,
        started_at=progress.started_at,
        ended_at=progress.ended_at,
        last_seq=progress.seqs.last,
        last_event=progress.last_event,
        last_detail=progress.last_detail,
        events=progress.events,
    )
    return (Change(REGISTRY_JOBS, job_id, row),)


JOB_RECORD_TYPES: Final = (JOB_REGISTERED, JOB_EVENT, JOB_CANCELLED)
