"""What a publisher of job events keeps on disk (JE-16): the last seq and the events that were not confirmed.

One JSON file a job, `<state_dir>/<job_id>.json`, 0600, replaced as a whole and fsynced before anything is
sent; beside it a lock file, so that two processes never take the same seq. A seq is on disk together with
the signed bytes that carry it: whoever comes back after a crash sends the same bytes under it, and with a new
secret the same event, signed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from connectors.agent_sdk.locked_state import LockedState
from schemas.errors import UsageError
from schemas.streams.job.job_event import TERMINAL_EVENTS
from schemas.wire.ids import is_job_id

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


class JobOutbox(LockedState[_State]):
    """The state of one job, locked while it is open. Use it as a context manager.

    Raises UsageError for a bad job id, and what LockedState raises.
    """

    def __init__(self, state_dir: Path, job_id: str, lock_timeout_s: float) -> None:
        if not is_job_id(job_id):
            raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
        self._job_id = job_id
        super().__init__(
            state_dir / f"{job_id}.json",
            _State(job_id),
            lock_timeout_s,
            whose=f"the state of job {job_id}",
            busy=f"another process has been publishing for job {job_id}",
            foreign="remove it if this job has published nothing yet",
        )

    def _is_own(self, state: _State) -> bool:
        return state.job_id == self._job_id

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

    def renew(self, build: Callable[[PendingEvent], bytes | None]) -> None:
        """Put the bytes that `build` makes of a pending event in the place of its own, under the same seq; None
        leaves it as it is. On disk when this returns.
        """
        made = [(pending, build(pending)) for pending in self._state.outbox]
        if any(new is not None for _, new in made):
            self._state.outbox = [
                pending if new is None else PendingEvent(pending.seq, pending.event, new.decode("utf-8"))
                for pending, new in made
            ]
            self._save()

    def confirm(self, pending: PendingEvent, *, rejected: bool = False) -> None:
        """Take a delivered event out. A rejected terminal event has not ended the job."""
        self._state.outbox.remove(pending)
        if rejected and self._state.ended_seq == pending.seq:
            self._state.ended_seq = None
        self._save()


def event_fields(pending: PendingEvent) -> dict[str, Any]:
    """The event in a pending entry, decoded."""
    found: dict[str, Any] = msgspec.json.decode(pending.wire_bytes)
    return found
