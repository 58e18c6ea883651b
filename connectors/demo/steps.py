"""The elements of the demo's plan: steps, scripts, and the builder of a job's script."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final

from schemas.fold import life_cycles as states
from schemas.streams.job.job_event import COMPLETED, ERROR, PROGRESS, STARTED, TERMINAL_EVENTS
from schemas.streams.job.job_registry import JOB_TERMINAL
from schemas.wire.field_checks import SCHEMA_VERSION
from schemas.wire.signing import sign_event
from schemas.wire.strict_json import canonical
from schemas.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED, Verdict

_STATE_AFTER: Final = {COMPLETED: states.COMPLETED, ERROR: states.ERROR}
_DOING: Final = (
    "reading the index",
    "comparing drafts",
    "running the checks",
    "asking a colleague",
    "summing up",
)


@dataclass(frozen=True)
class Actor:
    """A registered job of the demo, and the secret that its agent signs with."""

    job_id: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class AgentEvent:
    """An event for the job's publisher, which numbers and signs it and waits for the receipt."""

    event: str
    detail: str
    data: dict[str, Any]


@dataclass(frozen=True)
class RawMessage:
    """Bytes that the unruly connection publishes below `<prefix>/<topic_id>/events`."""

    topic_id: str
    payload: bytes = field(repr=False)
    retain: bool = False


@dataclass(frozen=True)
class SentAgain:
    """The bytes of an earlier step of the script, sent again by the unruly connection."""

    of: int


@dataclass(frozen=True)
class Cancellation:
    """The operator cancels the job. This is no job event but a record of its own type."""


@dataclass(frozen=True)
class Pick:
    """A session picks the job at the gateway. This is no job event either."""


@dataclass(frozen=True)
class Step:
    """One action. If it sends a job event, also the expected verdict and other fields of the ledger row."""

    action: AgentEvent | RawMessage | SentAgain | Cancellation | Pick
    label: str
    verdict: Verdict = ACCEPTED
    reason: str | None = None
    late: bool = False
    masked: str | None = None


@dataclass(frozen=True)
class Script:
    """Steps in the order in which they must reach Kafka. `actor` and `state` are None for strangers."""

    title: str
    actor: Actor | None
    steps: tuple[Step, ...]
    state: str | None


@dataclass
class ScriptBuilder:
    """Builds the script of one job, and keeps count of its seq and state.

    `sent_at` is the timestamp of events that the builder signs itself. `forger_secret` is another secret than
    the job's, for forged events. `limit_bytes` is the largest body that is accepted.
    """

    title: str
    actor: Actor
    draw: random.Random
    sent_at: str
    forger_secret: str = ""
    limit_bytes: int = 0
    next_seq: int = field(default=1, init=False)
    _steps: list[Step] = field(default_factory=list, init=False)
    _state: str = field(default=states.PENDING, init=False)
    _raw_seqs: bool = field(default=False, init=False)

    def script(self) -> Script:
        """Return the finished script."""
        return Script(self.title, self.actor, tuple(self._steps), self._state)

    def agent(self, event: str, detail: str | None = None, **data: Any) -> int:
        """Add an accepted event that the agent's publisher sends. Return the step's number."""
        if self._raw_seqs:
            raise ValueError("the publisher's own count is behind: go on with `signed`")
        text = detail or f"{self.draw.choice(_DOING)}, step {self.next_seq}"
        self._accept(event)
        self.next_seq += 1
        return self._add(Step(AgentEvent(event, text, data), f"{event} by the agent's publisher"))

    def work(self, least: int = 1, most: int = 3) -> None:
        """Add the start and some progress."""
        self.agent(STARTED, "begins")
        for number in range(self.draw.randint(least, most)):
            self.agent(PROGRESS, done=number + 1)

    def body(self, event: str, seq: int, detail: str, **data: Any) -> dict[str, Any]:
        """Return an event's fields, not signed."""
        return {
            "schema_version": SCHEMA_VERSION,
            "seq": seq,
            "job_id": self.actor.job_id,
            "event": event,
            "timestamp": self.sent_at,
            "detail": detail,
            "data": data,
        }

    def signed(
        self, label: str, event: str, seq: int, detail: str, *, late: bool = False, masked: str | None = None
    ) -> int:
        """Add an accepted event that is sent without the publisher, with a valid signature and a new seq."""
        self._raw_seqs = True
        self._accept(event)
        self.next_seq = max(self.next_seq, seq + 1)
        payload = canonical(sign_event(self.body(event, seq, detail), self.actor.secret))
        raw = RawMessage(self.actor.job_id, payload, retain=event in TERMINAL_EVENTS)
        return self._add(Step(raw, label, late=late, masked=masked))

    def refused(
        self, label: str, reason: str, event: str, detail: str, seq: int | None = None, **data: Any
    ) -> None:
        """Add an event that is rejected though it is well signed. Its seq is the next one unless given."""
        body = self.body(event, self.next_seq if seq is None else seq, detail, **data)
        self.refused_bytes(label, reason, canonical(sign_event(body, self.actor.secret)))

    def refused_bytes(self, label: str, reason: str, payload: bytes, masked: str | None = None) -> None:
        """Add bytes on the job's topic that are rejected."""
        self._add(Step(RawMessage(self.actor.job_id, payload), label, REJECTED, reason, masked=masked))

    def again(self, of: int, label: str) -> int:
        """Add the bytes of an accepted step once more, which is a duplicate."""
        return self._add(Step(SentAgain(of), label, DUPLICATE, masked=self._steps[of].masked))

    def reworded(self, event: str, detail: str) -> None:
        """Add a signed event, then a duplicate of it with spaces and its keys in another order."""
        seq = self.next_seq
        self.signed(f"{event}, sent past the publisher", event, seq, detail)
        signed = sign_event(self.body(event, seq, detail), self.actor.secret)
        text = "{ " + ", ".join(f"{_json(k)}: {_json(signed[k])}" for k in reversed(list(signed))) + " }"
        raw = RawMessage(self.actor.job_id, text.encode("utf-8"))
        self._add(Step(raw, "the same event, keys in another order", DUPLICATE))

    def pick(self) -> None:
        """Add the pick by the job's session."""
        self._state = states.RUNNING
        self._add(Step(Pick(), "picked at the gateway"))

    def cancel(self) -> None:
        """Add the cancellation by the operator."""
        self._state = states.CANCELLED
        self._add(Step(Cancellation(), "cancelled by the operator"))

    def _accept(self, event: str) -> None:
        if self._state in JOB_TERMINAL:
            raise ValueError("the job has ended")
        self._state = _STATE_AFTER.get(event, states.RUNNING)

    def _add(self, step: Step) -> int:
        self._steps.append(step)
        return len(self._steps) - 1


def _json(value: Any) -> str:
    return canonical(value).decode("utf-8")
