"""What a publisher of job events keeps on disk (JE-16): the last seq and the events that were not confirmed.

One JSON file a job, `<state_dir>/<job_id>.json`, 0600, replaced as a whole and fsynced before anything is
sent; beside it a lock file, so that two processes never take the same seq. A seq is on disk together with
the signed bytes that carry it: whoever comes back after a crash sends the same bytes under it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from schemas.errors import TrunklineError, UsageError
from schemas.ids import is_job_id
from schemas.job_event import TERMINAL_EVENTS

_LOCK_TICK_S: Final = 0.02
_SEQ_LIMIT: Final = 2**63 - 1


class PendingEvent(msgspec.Struct, frozen=True):
    """An event that has its seq and its bytes, and no confirmation yet."""

    seq: int
    event: str
    payload: str

    @property
    def wire_bytes(self) -> bytes:
        """What goes on the wire, the same at every attempt."""
        return self.payload.encode("utf-8")

    @property
    def is_terminal(self) -> bool:
        """Whether this event ends the job."""
        return self.event in TERMINAL_EVENTS


class _State(msgspec.Struct):
    job_id: str
    last_seq: int = 0
    ended_seq: int | None = None
    outbox: list[PendingEvent] = []


class OutboxBusyError(TrunklineError):
    """Another process publishes for this job and did not finish in time."""


class JobOutbox:
    """The state of one job, locked while it is open. Use it as a context manager.

    Raises UsageError for a bad job id, OutboxBusyError after `lock_timeout_s` seconds, TrunklineError when
    the file cannot be read or written.
    """

    def __init__(self, state_dir: Path, job_id: str, lock_timeout_s: float) -> None:
        if not is_job_id(job_id):
            raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
        self._folder = state_dir
        self._job_id = job_id
        self._path = state_dir / f"{job_id}.json"
        self._lock_timeout_s = lock_timeout_s
        self._lock_fd = -1
        self._state = _State(job_id)

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_fd = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise TrunklineError(f"cannot keep the publisher's state: {error}") from error
        try:
            self._lock()
            self._state = self._load()
        except BaseException:
            os.close(self._lock_fd)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock_fd)  # which also unlocks

    @property
    def last_seq(self) -> int:
        """The highest seq that was taken, 0 before the first."""
        return self._state.last_seq

    @property
    def ended_seq(self) -> int | None:
        """The seq of the job's own terminal event, None before it."""
        return self._state.ended_seq

    @property
    def pending(self) -> tuple[PendingEvent, ...]:
        """What was not confirmed, in the order of seq."""
        return tuple(self._state.outbox)

    def add(self, event: str, build: Callable[[int], bytes]) -> PendingEvent:
        """Take the next seq for the bytes that `build(seq)` makes. On disk when this returns."""
        seq = self._state.last_seq + 1
        if seq > _SEQ_LIMIT:
            raise UsageError("this job has used up its sequence numbers")
        pending = PendingEvent(seq, event, build(seq).decode("utf-8"))
        self._state.last_seq = seq
        if pending.is_terminal:
            self._state.ended_seq = seq
        self._state.outbox.append(pending)
        self._save()
        return pending

    def confirm(self, pending: PendingEvent, *, rejected: bool = False) -> None:
        """Take a delivered event out. A rejected terminal event has not ended the job."""
        self._state.outbox.remove(pending)
        if rejected and self._state.ended_seq == pending.seq:
            self._state.ended_seq = None
        self._save()

    def _lock(self) -> None:
        deadline = time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OutboxBusyError(
                        f"another process has been publishing for job {self._job_id} for more than "
                        f"{self._lock_timeout_s:.0f} s; wait for it or end it"
                    ) from None
                time.sleep(_LOCK_TICK_S)
            else:
                return

    def _load(self) -> _State:
        try:
            state = msgspec.json.decode(self._path.read_bytes(), type=_State)
        except FileNotFoundError:
            return _State(self._job_id)
        except OSError as error:
            raise TrunklineError(f"cannot read the publisher's state: {error}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            state = None
        if state is None or state.job_id != self._job_id:
            raise TrunklineError(
                f"{self._path} is not the state of job {self._job_id}; it is written as a whole, so somebody "
                "else changed it: restore it, or remove it if this job has published nothing yet"
            )
        return state

    def _save(self) -> None:
        draft = self._path.with_suffix(".draft")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(self._state))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
            folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder_fd)
            finally:
                os.close(folder_fd)
        except OSError as error:
            raise TrunklineError(f"cannot write the publisher's state: {error}") from error


def event_fields(pending: PendingEvent) -> dict[str, Any]:
    """The event in a pending entry, decoded."""
    found: dict[str, Any] = msgspec.json.decode(pending.wire_bytes)
    return found
