"""The fold of the stream `job/<id>`: registration, picks, events, cancellation and secret rotation.

JE-06 to JE-08 and JE-11 have the rules.

Entries:
`job`: the registration and the secrets, written by a registration and a rotation.
`progress`: the progress, written by every other accepted record.
`seqs/<16 hex digits>`: the digests of older seqs of a long job (`schemas.fold.memories`).
`rotations`, `rotations/<2 hex digits>`: the requests that rotated the secret (decision 0021).

They remain after the job has ended, without the description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from schemas.fold.entries import Entries
from schemas.fold.memories import RequestMemory, SeqMemory, content_digest
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.stream_kind import CANCELLED, PENDING, RUNNING, FoldInput, StreamKind, wrong_state
from schemas.keys.sealing import Keyring, UnsealError, job_secret_purpose, sealed_by
from schemas.streams.job.job_registry import (
    ENTRY_VERSION,
    JOB_CANCELLED,
    JOB_ENTRY,
    JOB_EVENT,
    JOB_MODELS,
    JOB_PICKED,
    JOB_REGISTERED,
    JOB_TRANSITIONS,
    OLDER_ROTATIONS,
    PROGRESS,
    REGISTRY_JOBS,
    ROTATIONS,
    SEQS,
    JobEntry,
    JobRow,
    ProgressEntry,
    RotationsEntry,
    event_digest,
    is_signed,
)
from trunkline_agent.wire.ids import JOB
from trunkline_agent.wire.job_event import STARTED, TERMINAL_EVENTS, event_fault
from trunkline_agent.wire.signing import SIGNATURE_FIELD, signed_bytes
from trunkline_agent.wire.strict_json import canonical, canonical_plain
from trunkline_agent.wire.unsafe_text import MASK, carries_token
from trunkline_agent.wire.verdicts import (
    BAD_SIGNATURE,
    ILLEGAL_TRANSITION,
    SECRET_IN_EVENT,
    SEQ_CONFLICT,
    UNKNOWN_STREAM,
)


def settle_job(given: FoldInput) -> Outcome:
    """Settle a record of `job/<id>`: update the stream state, return verdict and changed rows.

    The record registers or cancels the job, lets a session pick it, reports an event, or rotates the secret. An
    event is accepted only with a valid signature by the job's secret. `schemas.streams.fold.settle` calls this
    function with a checked body. The changes of the stream state, `given.entries`, count only if the record is
    accepted.
    """
    record_type, entries = given.envelope.type, given.entries
    if record_type == JOB_REGISTERED:
        return _settle_registration(given)
    job, progress = JOB_ENTRY.read(entries), PROGRESS.read(entries)
    if job is None or progress is None:
        return rejected(UNKNOWN_STREAM, "no job with this id was registered")
    if record_type == JOB_EVENT:
        return _settle_event(given, job, progress)
    if record_type == JOB_PICKED:
        return _settle_pick(given, job, progress)
    if record_type == JOB_CANCELLED:
        return _settle_cancellation(given, job, progress)
    return _settle_rotation(given, job, progress)


def _settle_registration(given: FoldInput) -> Outcome:
    body, entries = given.body, given.entries
    digest = content_digest(body)
    known, progress = JOB_ENTRY.read(entries), PROGRESS.read(entries)
    if known is not None and progress is not None:
        if known.digest == digest:
            return duplicate(progress.status)
        return rejected(SEQ_CONFLICT, "a job with this id is registered already", progress.status)
    job = JobEntry(
        version=ENTRY_VERSION,
        description=body["description"],
        session=body.get("session"),
        broker=None if body.get("broker") is None else canonical(body["broker"]).decode("utf-8"),
        sealed_secret=body["sealed_secret"],
        registered_by=given.sender,
        registered_at=given.now_us,
        digest=digest,
        request_id=body.get("request_id"),
        notify=body.get("notify"),
    )
    progress = ProgressEntry(ENTRY_VERSION, PENDING, SeqMemory())
    JOB_ENTRY.write(entries, job)
    PROGRESS.write(entries, progress)
    return accepted(PENDING, rows=partial(_rows, given.name, job, progress))


def _settle_cancellation(given: FoldInput, job: JobEntry, progress: ProgressEntry) -> Outcome:
    ce_id, status = given.envelope.ce_id, progress.status
    identity = (ce_id, content_digest(given.body))
    if progress.cancelled_by == identity:
        return duplicate(status)
    if progress.cancelled_by is not None and progress.cancelled_by[0] == ce_id:
        return rejected(SEQ_CONFLICT, "this request id cancelled the job with another reason", status)
    if CANCELLED not in JOB_TRANSITIONS[status]:
        return wrong_state(JOB_TRANSITIONS, status, "job")
    progress.status = CANCELLED
    progress.ended_at = given.now_us
    progress.ended_by = ce_id
    progress.cancelled_by = identity
    return _keep(given, job, progress, late=False)


def _settle_pick(given: FoldInput, job: JobEntry, progress: ProgressEntry) -> Outcome:
    status, session = progress.status, given.body["session"]
    if progress.session == session:
        return duplicate(status)
    if RUNNING not in JOB_TRANSITIONS[status]:
        return wrong_state(JOB_TRANSITIONS, status, "job", "the job is taken")
    if job.session is not None and job.session != session:
        return rejected(ILLEGAL_TRANSITION, "the job waits for another session", status)
    progress.status = RUNNING
    progress.session = session
    progress.picked_at = given.now_us
    return _keep(given, job, progress, late=False)


def _settle_rotation(given: FoldInput, job: JobEntry, progress: ProgressEntry) -> Outcome:
    status, body = progress.status, given.body
    sealed = body["sealed_secret"]
    try:
        # If the secret could not be opened, the fold would fail on every later event of the job.
        given.keyring.job_signer(sealed, given.name)
    except UnsealError:
        return rejected(BAD_SIGNATURE, "sealed_secret: sealed for something else, or changed", status)
    settled = ROTATIONS.read(given.entries) or RotationsEntry(ENTRY_VERSION, RequestMemory())
    repeated = settled.requests.repeated(given, OLDER_ROTATIONS, status)
    if repeated is not None:
        return repeated
    if not JOB_TRANSITIONS[status]:
        return wrong_state(JOB_TRANSITIONS, status, "job")
    if sealed == job.sealed_secret:
        return rejected(ILLEGAL_TRANSITION, "the job has this secret already", status)
    job = msgspec.structs.replace(
        job,
        sealed_secret=sealed,
        old_secret=job.sealed_secret,
        old_until=given.now_us + body["overlap_ms"] * 1000,
        first_secret=job.first_secret or job.sealed_secret,
        rotations=job.rotations + 1,
    )
    settled.requests.add(given, OLDER_ROTATIONS)
    ROTATIONS.write(given.entries, settled)
    JOB_ENTRY.write(given.entries, job)
    return accepted(status, rows=partial(_rows, given.name, job, progress))


def _settle_event(given: FoldInput, job: JobEntry, progress: ProgressEntry) -> Outcome:
    event, job_id, status, now_us = given.body, given.name, progress.status, given.record.logged_at_us
    signature = event["data"].get(SIGNATURE_FIELD)
    content = _to_sign(event, given.plain)
    if not is_signed(content, signature, now_us, job_id, job, given.keyring):
        return rejected(BAD_SIGNATURE, "data.hmac_sig is missing or does not fit the job's secret", status)
    if given.masked and carries_token(event):
        return rejected(SECRET_IN_EVENT, "data.auth_token must never be sent", status)
    seq = event["seq"]
    digest = event_digest(content, signature, job_id, job, given.keyring)
    repeated = progress.seqs.repeated(seq, digest, given.entries, SEQS, status)
    if repeated is not None:
        return repeated
    # Every event implies that the job runs. A final event ends a running job.
    kind, reached = event["event"], RUNNING
    if status != RUNNING and RUNNING not in JOB_TRANSITIONS[status]:
        return wrong_state(JOB_TRANSITIONS, status, "job")
    if kind == STARTED and seq != 1:
        return rejected(ILLEGAL_TRANSITION, "started must have seq 1", status)
    if kind in TERMINAL_EVENTS:
        reached = kind
        if reached not in JOB_TRANSITIONS[RUNNING]:
            return wrong_state(JOB_TRANSITIONS, status, "job")
    late = seq < progress.seqs.last
    progress.seqs.add(seq, digest, given.entries, SEQS)
    progress.events += 1
    if progress.started_at is None:
        progress.started_at = now_us
    if not late:
        progress.last_event = kind
        progress.last_detail = MASK if given.masked else event["detail"]
    progress.status = reached
    if reached != RUNNING:
        progress.ended_at = now_us
        progress.ended_by = given.envelope.ce_id
    return _keep(given, job, progress, late=late)


def _to_sign(event: dict[str, Any], plain: bool) -> bytes:
    if not plain:
        return signed_bytes(event)
    data = event["data"]
    signature = data.pop(SIGNATURE_FIELD, None)
    content = canonical_plain(event)
    if signature is not None:
        data[SIGNATURE_FIELD] = signature
    return content


def _keep(given: FoldInput, job: JobEntry, progress: ProgressEntry, *, late: bool) -> Outcome:
    PROGRESS.write(given.entries, progress)
    if not JOB_TRANSITIONS[progress.status]:
        JOB_ENTRY.write(given.entries, msgspec.structs.replace(job, description=""))
    return accepted(progress.status, late=late, rows=partial(_rows, given.name, job, progress))


def _rows(job_id: str, job: JobEntry, progress: ProgressEntry) -> tuple[Change, ...]:
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


JOB_KIND: Final = StreamKind(
    name=JOB,
    models=JOB_MODELS,
    settle=settle_job,
    row_of_each_stream=(JobRow,),
    rows=(JobRow,),
    named_by="job_id",
    misnamed="job_id: not the one of its topic",
    fast_checks={JOB_EVENT: event_fault},
)


@dataclass(frozen=True)
class JobGrant:
    """The data and secrets that a session needs to work on a job that it picked (JE-11).

    Attributes:
        job_id: the id of the job.
        description: the description of the job. It is empty after the job has ended.
        broker: the settings of the per-job broker as JSON, with a sealed password. `None` means the common one.
        request_id: the id of the request that registered the job, or `None`.
        secret: the current secret.
        registered_secret: the secret of the registration.
        key_id: the id of the master key that sealed `registered_secret`.
        old_secret: the secret before the last rotation, or `None` without one.
        old_until: the end of the validity of `old_secret`, in microseconds since 1970 UTC.
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
    """Return a job's description, broker and opened secrets, for the session that picked it.

    The caller must check that the session may have them: this function does not.

    Args:
        job_id: the id of the job.
        entries: the entries of the stream `job/<job_id>`.
        keyring: the master keys that open the secrets.

    Returns:
        The grant, or `None` if the job was never registered. A job that has ended has a grant, too, with an
        empty description.

    Raises:
        UnsealError: no master key of `keyring` opens a secret of the job.
    """
    job = JOB_ENTRY.read(entries)
    if job is None:
        return None
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
