"""The state of a job's stream, and the check of an event's signature against the job's secrets."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.memories import RequestMemory, SeqMemory
from schemas.keys.sealing import Keyring

ENTRY_VERSION: Final = 1
JOB_ENTRY: Final = "job"
PROGRESS: Final = "progress"


class JobEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The registration of a job, and its secrets. All secrets are sealed for the same purpose.

    Attributes:
        digest: the digest of the registration's content, to recognise a repeat.
        sealed_secret: the current secret.
        old_secret: the secret before the last rotation, or `None` without one. It is valid in records that were
            appended before `old_until`.
        old_until: microseconds since 1970 UTC.
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
    """The settled requests that rotated the job's secret."""

    version: int
    requests: RequestMemory


class ProgressEntry(msgspec.Struct, array_like=True, gc=False):
    """The progress of a job.

    `cancelled_by` is the CloudEvents id and the content digest of the record that cancelled the job. `ended_by`
    is the CloudEvents id of the record that ended it.
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


encode: Final = msgspec.msgpack.Encoder().encode
# Every event of a job reads this entry, which only a registration or a rotation writes. So its value is cached.
decode_job: Final = lru_cache(maxsize=20_000)(msgspec.msgpack.Decoder(JobEntry).decode)
decode_progress: Final = msgspec.msgpack.Decoder(ProgressEntry).decode
ROTATIONS: Final = StructEntries("rotations", RotationsEntry)


def is_signed(
    content: bytes, signature: object, logged_at_us: int, job_id: str, job: JobEntry, keyring: Keyring
) -> bool:
    """Return whether a signature is valid for the job's secret, or for its previous secret before `old_until`.

    Args:
        content: the signed bytes of the event.
        signature: the value of `data.hmac_sig`, which may be anything.
        logged_at_us: the append time of the event's record in microseconds since 1970 UTC.
        job_id: the id of the job, for which its secrets are sealed.
        job: the registration of the job.
        keyring: the master keys.
    """
    if keyring.job_signer(job.sealed_secret, job_id).verifies(content, signature):
        return True
    if job.old_secret is None or job.old_until is None or logged_at_us >= job.old_until:
        return False
    return keyring.job_signer(job.old_secret, job_id).verifies(content, signature)


def event_digest(content: bytes, signature: str, job_id: str, job: JobEntry, keyring: Keyring) -> bytes:
    """Return the 16-byte digest of an event's content, to recognise a repeated seq.

    The digest is the signature under the job's first secret. So an event that is signed again with a new secret
    after a rotation has the same digest.
    """
    if job.first_secret is not None:
        signature = keyring.job_signer(job.first_secret, job_id).hexdigest(content)
    return bytes.fromhex(signature[:32])
