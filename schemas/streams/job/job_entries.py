"""The entries of the stream `job/<id>`, and the check of an event's signature against the job's secrets."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.memories import RequestChunk, RequestMemory, SeqChunk, SeqMemory
from schemas.keys.sealing import Keyring

ENTRY_VERSION: Final = 1


class JobEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The entry `job` of a job's stream: its registration and its secrets.

    All secrets are sealed for the purpose `job-secret/<job id>`. Times are in microseconds since 1970 UTC.

    Attributes:
        session: the only session that may pick the job. `None` means any.
        broker: the settings of the per-job broker as JSON. `None` means the common broker.
        digest: the digest of the registration's content, to recognise a repeated registration.
        notify: the events of which the principal that registered the job is notified. `None` means its end.
        sealed_secret: the current secret.
        old_secret: the secret before the last rotation, or `None` before the first rotation. It is valid in
            records that were appended before `old_until`.
        first_secret: the secret of the registration, or `None` before the first rotation. The digests of events
            are made with it (`event_digest`).
        rotations: how often the secret was rotated.
    """

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
    old_secret: str | None = None
    old_until: int | None = None
    first_secret: str | None = None
    rotations: int = 0


class RotationsEntry(msgspec.Struct, array_like=True, gc=False):
    """The entry `rotations` of a job's stream: a memory of the requests that rotated the job's secret."""

    version: int
    requests: RequestMemory


class ProgressEntry(msgspec.Struct, array_like=True, gc=False):
    """The entry `progress` of a job's stream: its status, accepted seqs, newest event and times.

    `session` is the session that picked the job, or `None`. `cancelled_by` is the CloudEvents id and the
    content digest of the record that cancelled the job. `ended_by` is the CloudEvents id of the record that
    ended it. Times are in microseconds since 1970 UTC.
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


# Every event of a job reads this entry, which only a registration or a rotation writes. So its value is cached.
_decode_job: Final = lru_cache(maxsize=20_000)(msgspec.msgpack.Decoder(JobEntry).decode)
JOB_ENTRY: Final = StructEntries("job", JobEntry, _decode_job)
PROGRESS: Final = StructEntries("progress", ProgressEntry)
SEQS: Final = StructEntries("seqs/", SeqChunk)
ROTATIONS: Final = StructEntries("rotations", RotationsEntry)
OLDER_ROTATIONS: Final = StructEntries("rotations/", RequestChunk)


def is_signed(
    content: bytes, signature: object, logged_at_us: int, job_id: str, job: JobEntry, keyring: Keyring
) -> bool:
    """Return whether a job event is signed with the job's secret.

    After a rotation, the previous secret is valid, too, in records that were appended before `job.old_until`.

    Args:
        content: the bytes of the event that are signed (`signed_bytes`).
        signature: the value of `data.hmac_sig`, which may be anything.
        logged_at_us: the append time of the event's record in microseconds since 1970 UTC.
        job_id: the id of the job.
        job: the registration of the job, with its sealed secrets.
        keyring: the master keys that open the secrets.

    Raises:
        UnsealError: no master key opens a secret.
    """
    if keyring.job_signer(job.sealed_secret, job_id).verifies(content, signature):
        return True
    if job.old_secret is None or job.old_until is None or logged_at_us >= job.old_until:
        return False
    return keyring.job_signer(job.old_secret, job_id).verifies(content, signature)


def event_digest(content: bytes, signature: str, job_id: str, job: JobEntry, keyring: Keyring) -> bytes:
    """Return a digest (16 bytes) of a job event's content, by which the fold recognises a repeated event.

    It is the start of the event's signature with the job's first secret. An event that is signed again with a
    new secret after a rotation therefore has the same digest.

    Args:
        content: the bytes of the event that are signed (`signed_bytes`).
        signature: the signature of the event in hex, which `is_signed` has verified.
        job_id: the id of the job.
        job: the registration of the job, with its sealed secrets.
        keyring: the master keys that open the secrets.

    Raises:
        UnsealError: no master key opens the first secret.
    """
    if job.first_secret is not None:
        signature = keyring.job_signer(job.first_secret, job_id).hexdigest(content)
    return bytes.fromhex(signature[:32])
