"""The fold of `job/<id>`: what a registration, a pick, an event or a cancellation does to a job (JE-06 to
JE-08, JE-11).

Two entries: `job`, written at registration, and `progress`, written by every accepted record. A finished
job keeps both as its tombstone, without the description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec

from schemas import life_cycles as states
from schemas.entries import Entries
from schemas.job_event import COMPLETED, ERROR, STARTED
from schemas.masking import MASK, carries_token
from schemas.record import JOB_CANCELLED, JOB_PICKED, JOB_REGISTERED, Envelope, Record
from schemas.request_memory import content_digest
from schemas.sealing import Keyring, job_secret_purpose, sealed_by
from schemas.seq_memory import SeqMemory
from schemas.settled import Change, Outcome, accepted, duplicate, rejected
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
from schemas.view_rows import REGISTRY_JOBS, JobRow

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
    request_id: str | None = None
    notify: list[str] | None = None


class ProgressEntry(msgspec.Struct, array_like=True, gc=False):
    """How far the job is. `cancelled_by`: CloudEvents id and content digest of what cancelled it.
    `ended_by`: CloudEvents id of what ended it.
    """

    version: int
    status: str
    seqs: SeqMemory
    started_at: int | None = None
    ended_at: int | None = None
    last_event: str | None = None
    last_detail: str | None = None
    events: int = 0
    cancelled_by: tuple[str, bytes] | None = None
    session: str | None = None
    picked_at: int | None = None
    ended_by: str | None = None


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
    if envelope.type == JOB_PICKED:
        return _settle_pick(record, job_id, body["session"], job, progress, entries)
    if envelope.type == JOB_CANCELLED:
        return _settle_cancellation(record, envelope, job_id, body, job, progress, entries)
    return _settle_event(record, envelope, job_id, body, plain, masked, job, progress, entries, keyring)


def _settle_registration(
    record: Record, envelope: Envelope, job_id: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    digest = content_digest(body)
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
        request_id=body.get("request_id"),
        notify=body.get("notify"),
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
    identity = (envelope.ce_id, content_digest(body))
    if progress.cancelled_by == identity:
        return duplicate(progress.status)
    if progress.cancelled_by is not None and progress.cancelled_by[0] == envelope.ce_id:
        return rejected(SEQ_CONFLICT, "this request id cancelled the job with another reason", progress.status)
    if progress.status in states.JOB_TERMINAL:
        return rejected(AFTER_TERMINAL, f"the job is {progress.status}", progress.status)
    progress.status = states.CANCELLED
    progress.ended_at = record.logged_at_us
    progress.ended_by = envelope.ce_id
    progress.cancelled_by = identity
    return _keep(job_id, job, progress, entries, late=False)


def _settle_pick(
    record: Record, job_id: str, session: str, job: JobEntry, progress: ProgressEntry, entries: Entries
) -> Outcome:
    status = progress.status
    if progress.session == session:
        return duplicate(status)
    if status in states.JOB_TERMINAL:
        return rejected(AFTER_TERMINAL, f"the job is {status}", status)
    if status != states.PENDING:
        return rejected(ILLEGAL_TRANSITION, "the job is taken", status)
    if job.session is not None and job.session != session:
        return rejected(ILLEGAL_TRANSITION, "the job waits for another session", status)
    progress.status = states.RUNNING
    progress.session = session
    progress.picked_at = record.logged_at_us
    return _keep(job_id, job, progress, entries, late=False)


def _settle_event(
    record: Record,
    envelope: Envelope,
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
        progress.ended_by = envelope.ce_id
    return _keep(job_id, job, progress, entries, late=late)


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
        session_wanted=job.session,
        session=progress.session,
        registered_by=job.registered_by,
        registered_at=job.registered_at,
        picked_at=progress.picked_at,
        started_at=progress.started_at,
        ended_at=progress.ended_at,
        ended_by=progress.ended_by,
        last_seq=progress.seqs.last,
        last_event=progress.last_event,
        last_detail=progress.last_detail,
        events=progress.events,
        notify=job.notify,
    )
    return (Change(REGISTRY_JOBS, job_id, row),)


@dataclass(frozen=True)
class JobGrant:
    """What the winner of a job gets (JE-11). `broker`: the job's overlay as JSON, its password sealed.
    `request_id`: of the request that registered it. `key_id`: of the master key that sealed its secret.
    """

    job_id: str
    description: str
    broker: str | None
    request_id: str | None
    secret: str = field(repr=False)
    key_id: str


def job_grant(job_id: str, entries: Entries, keyring: Keyring) -> JobGrant | None:
    """The grant of a job from its entries, None for an unknown job. Raises UnsealError."""
    raw = entries.get(_JOB)
    if raw is None:
        return None
    job = _decode_job(raw)
    secret = keyring.open(job.sealed_secret, job_secret_purpose(job_id)).decode("utf-8")
    key_id = sealed_by(job.sealed_secret)
    return JobGrant(job_id, job.description, job.broker, job.request_id, secret, key_id)
