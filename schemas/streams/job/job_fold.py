"""The fold of `job/<id>`: what a registration, a pick, an event, a cancellation or a new secret does to a job
(JE-06 to JE-08, JE-11, decision 0021).

Entries: `job`, written at registration and when its secret changes, `progress`, written by every other
accepted record, and `rotations`, the requests that changed its secret. A finished job keeps them as its
tombstone, without the description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from schemas.fold import life_cycles as states
from schemas.fold.entries import Entries
from schemas.fold.request_memory import RequestMemory, content_digest
from schemas.fold.seq_memory import SeqMemory
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.view_rows import REGISTRY_JOBS, JobRow
from schemas.keys.sealing import Keyring, UnsealError, job_secret_purpose, sealed_by
from schemas.streams.job.job_entries import (
    ENTRY_VERSION,
    JOB_ENTRY,
    PROGRESS,
    ROTATIONS,
    JobEntry,
    ProgressEntry,
    RotationsEntry,
    decode_job,
    decode_progress,
    decode_rotations,
    encode,
    event_digest,
    is_signed,
)
from schemas.streams.job.job_event import COMPLETED, ERROR, STARTED
from schemas.wire.masking import MASK, carries_token
from schemas.wire.record import (
    JOB_CANCELLED,
    JOB_PICKED,
    JOB_REGISTERED,
    JOB_SECRET_ROTATED,
    Envelope,
    Record,
)
from schemas.wire.signing import SIGNATURE_FIELD, signed_bytes
from schemas.wire.strict_json import canonical, canonical_plain
from schemas.wire.verdicts import (
    AFTER_TERMINAL,
    BAD_SIGNATURE,
    ILLEGAL_TRANSITION,
    SECRET_IN_EVENT,
    SEQ_CONFLICT,
    TOO_LATE,
    UNKNOWN_STREAM,
)

_STATUS_BY_EVENT: Final = {COMPLETED: states.COMPLETED, ERROR: states.ERROR}


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
    raw_job, raw_progress = entries.get(JOB_ENTRY), entries.get(PROGRESS)
    if raw_job is None or raw_progress is None:
        return rejected(UNKNOWN_STREAM, "no job with this id was registered")
    job, progress = decode_job(raw_job), decode_progress(raw_progress)
    if envelope.type == JOB_PICKED:
        return _settle_pick(record, job_id, body["session"], job, progress, entries)
    if envelope.type == JOB_CANCELLED:
        return _settle_cancellation(record, envelope, job_id, body, job, progress, entries)
    if envelope.type == JOB_SECRET_ROTATED:
        return _settle_rotation(record, envelope, job_id, body, job, progress, entries, keyring)
    return _settle_event(record, envelope, job_id, body, plain, masked, job, progress, entries, keyring)


def _settle_registration(
    record: Record, envelope: Envelope, job_id: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    digest = content_digest(body)
    known = entries.get(JOB_ENTRY)
    if known is not None:
        status = decode_progress(entries.get(PROGRESS) or b"").status
        if decode_job(known).digest == digest:
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
    entries.put(JOB_ENTRY, encode(job))
    entries.put(PROGRESS, encode(progress))
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


def _settle_rotation(
    record: Record,
    envelope: Envelope,
    job_id: str,
    body: dict[str, Any],
    job: JobEntry,
    progress: ProgressEntry,
    entries: Entries,
    keyring: Keyring,
) -> Outcome:
    status, sealed = progress.status, body["sealed_secret"]
    try:
        # Taken over unseen, it would make each later event of the job a bug of ours.
        keyring.job_signer(sealed, job_id)
    except UnsealError:
        return rejected(BAD_SIGNATURE, "sealed_secret: sealed for something else, or changed", status)
    raw = entries.get(ROTATIONS)
    settled = RotationsEntry(ENTRY_VERSION, RequestMemory()) if raw is None else decode_rotations(raw)
    seen = settled.requests.seen(envelope.ce_id, body)
    if seen == "same":
        return duplicate(status)
    if seen == "other":
        return rejected(SEQ_CONFLICT, "this request id was used with other content", status)
    if status in states.JOB_TERMINAL:
        return rejected(AFTER_TERMINAL, f"the job is {status}", status)
    if sealed == job.sealed_secret:
        return rejected(ILLEGAL_TRANSITION, "the job has this secret already", status)
    job = msgspec.structs.replace(
        job,
        sealed_secret=sealed,
        old_secret=job.sealed_secret,
        old_until=record.logged_at_us + body["overlap_ms"] * 1000,
        first_secret=job.first_secret or job.sealed_secret,
        rotations=job.rotations + 1,
    )
    settled.requests.add(envelope.ce_id, body)
    entries.put(ROTATIONS, encode(settled))
    entries.put(JOB_ENTRY, encode(job))
    return accepted(status, _changes(job_id, job, progress))


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
    content = _to_sign(event, plain)
    if not is_signed(content, signature, record.logged_at_us, job_id, job, keyring):
        return rejected(BAD_SIGNATURE, "data.hmac_sig is missing or does not fit the job's secret", status)
    if masked and carries_token(event):
        return rejected(SECRET_IN_EVENT, "data.auth_token must never be sent", status)
    seq = event["seq"]
    digest = event_digest(content, signature, job_id, job, keyring)
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
    entries.put(PROGRESS, encode(progress))
    if progress.status in states.JOB_TERMINAL:
        entries.put(JOB_ENTRY, encode(msgspec.structs.replace(job, description="")))
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
        secret_rotations=job.rotations or None,
        old_secret_ends_at=job.old_until,
    )
    return (Change(REGISTRY_JOBS, job_id, row),)


@dataclass(frozen=True)
class JobGrant:
    """What the winner of a job gets (JE-11). `broker`: the job's overlay as JSON, its password sealed.
    `request_id`: of the request that registered it with `registered_secret`, which the master key `key_id` has
    sealed. `old_secret`: the one before the last rotation; `old_until`: as in the entry.
    """

    job_id: str
    description: str
    broker: str | None
    request_id: str | None
    secret: str = field(repr=False)
    registered_secret: str = field(repr=False)
    key_id: str
    old_secret: str | None = field(repr=False, default=None)
    old_until: int | None = None


def job_grant(job_id: str, entries: Entries, keyring: Keyring) -> JobGrant | None:
    """The grant of a job from its entries, None for an unknown job. Raises UnsealError."""
    raw = entries.get(JOB_ENTRY)
    if raw is None:
        return None
    job = decode_job(raw)
    registered = job.first_secret or job.sealed_secret

    def opened(sealed: str) -> str:
        return keyring.open(sealed, job_secret_purpose(job_id)).decode("utf-8")

    return JobGrant(
        job_id,
        job.description,
        job.broker,
        job.request_id,
        secret=opened(job.sealed_secret),
        registered_secret=opened(registered),
        key_id=sealed_by(registered),
        old_secret=None if job.old_secret is None else opened(job.old_secret),
        old_until=job.old_until,
    )
