"""The entries of a job's stream, and which of its secrets an event is believed by."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from schemas.fold.memories import RequestMemory, SeqMemory
from schemas.keys.sealing import Keyring

ENTRY_VERSION: Final = 1
JOB_ENTRY: Final = "job"
PROGRESS: Final = "progress"
ROTATIONS: Final = "rotations"


class JobEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What registration said. `digest` tells a registration sent again from another one.

    `sealed_secret` is the one of now. After a rotation: `old_secret` signs, too, in records that were logged
    before `old_until` (microseconds since 1970 UTC); `first_secret`, of the registration, is what contents of
    events are told apart by. All are sealed alike.
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
    """The requests that gave the job a new secret."""

    version: int
    requests: RequestMemory


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


encode: Final = msgspec.msgpack.Encoder().encode
# An entry that registration wrote is read by every event of the job and hardly ever changed: decoded once.
decode_job: Final = lru_cache(maxsize=20_000)(msgspec.msgpack.Decoder(JobEntry).decode)
decode_progress: Final = msgspec.msgpack.Decoder(ProgressEntry).decode
decode_rotations: Final = msgspec.msgpack.Decoder(RotationsEntry).decode


def is_signed(
    content: bytes, signature: object, logged_at_us: int, job_id: str, job: JobEntry, keyring: Keyring
) -> bool:
    """Whether the signature fits the job's secret, or the one before it while that is good."""
    if keyring.job_signer(job.sealed_secret, job_id).verifies(content, signature):
        return True
    if job.old_secret is None or job.old_until is None or logged_at_us >= job.old_until:
        return False
    return keyring.job_signer(job.old_secret, job_id).verifies(content, signature)


def event_digest(content: bytes, signature: str, job_id: str, job: JobEntry, keyring: Keyring) -> bytes:
    """What tells contents of one seq apart: a keyed hash, always under the first secret, so that an event that
    is signed anew after a rotation is known again.
    """
    if job.first_secret is not None:
        signature = keyring.job_signer(job.first_secret, job_id).hexdigest(content)
    return bytes.fromhex(signature[:32])
