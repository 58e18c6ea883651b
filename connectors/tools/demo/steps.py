"""The elements of the demo's plan: steps such as an event to send, a job's script, and the script's builder."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from schemas.fold import stream_kind as states
from schemas.streams.job.job_registry import JOB_TERMINAL
from trunkline_agent.wire.job_event import COMPLETED, ERROR, PROGRESS, SCHEMA_VERSION, STARTED, TERMINAL_EVENTS
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED

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
    """A registered job of the demo, the secret that its agent signs with, and the session that may pick it."""

    job_id: str
    secret: str = field(repr=False)
    session: str = ""


class Action(NamedTuple):
    """A call of a method of `Player`: its name and arguments."""

    method: str
    arguments: tuple[Any, ...] = ()

    def play(self, player: Player) -> str | None:
        """Carry it out. Return the CloudEvents id of the job event that was sent; None for no job event."""
        found: str | None = getattr(player, self.method)(*self.arguments)
        return found


class Player(Protocol):
    """The actions of the steps of one script. Each returns the CloudEvents id of the event that it sends."""

    def publish(self, event: str, detail: str, data: dict[str, Any]) -> str:
        """Send an event with the job's publisher, which numbers and signs it and waits for the receipt."""

    def send(self, topic_id: str, payload: bytes, retain: bool) -> str:
        """Publish any bytes on the MQTT topic `<prefix>/<topic_id>/events`, without the job's publisher."""

    def send_again(self, of: int) -> str:
        """Publish the bytes of the script's earlier step with the number `of` once more."""

    def cancel(self) -> None:
        """Cancel the job as the operator. This is no job event but a record of its own type."""

    def pick(self) -> None:
        """Let the job's session pick it at the gateway. This is no job event but a record of its own type."""


class Expected(NamedTuple):
    """The planned ledger row of a job event.

    Attributes:
        verdict: The planned verdict.
        reason: The planned reason of a rejection; None for another verdict.
        late: Whether the event must be accepted after one with a higher seq.
        masked: The part that the ledger must mask; None for no such part.
    """

    verdict: str = ACCEPTED
    reason: str | None = None
    late: bool = False
    masked: str | None = None

    def __str__(self) -> str:
        marks = [self.verdict, self.reason, "late" if self.late else None]
        return " ".join(m for m in marks if m) + (f" (masked: {self.masked})" if self.masked else "")


class Step(NamedTuple):
    """One action of a script, a text for the report, and the planned ledger row; None: it is no job event."""

    action: Action
    label: str
    expected: Expected | None = Expected()


@dataclass(frozen=True)
class Script:
    """The steps of one job, in the order in which they must reach Kafka.

    Attributes:
        title: The job's role, for the report.
        actor: The registered job; None for a stranger.
        steps: The steps.
        state: The state that the job must have at the end; None for a stranger.
    """

    title: str
    actor: Actor | None
    steps: tuple[Step, ...]
    state: str | None


@dataclass
class ScriptBuilder:
    """A builder of the script of one job. Its methods add steps, and it keeps count of the job's seq and state.

    Attributes:
        title: The job's role, for the report.
        actor: The job and its secret.
        draw: The source of random choices.
        sent_at: The timestamp of events that the builder signs itself.
        forger_secret: Another secret than the job's, for forged events.
        limit_bytes: The size of the largest body that the stack accepts.
        next_seq: The seq of the next event.
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
        """Return a script with the steps that were added so far."""
        return Script(self.title, self.actor, tuple(self._steps), self._state)

    def agent(self, event: str, detail: str | None = None, **data: Any) -> int:
        """Add an event that the job's publisher sends and that must be accepted. Return the step's number.

        Raises ValueError if the job has ended or `signed` was called before, because the publisher counts seq.

        Args:
            event: The type of the event, such as `progress`.
            detail: A text in the event; None takes a random one.
            data: More fields of the event.
        """
        if self._raw_seqs:
            raise ValueError("the publisher's own count is behind: go on with `signed`")
        text = detail or f"{self.draw.choice(_DOING)}, step {self.next_seq}"
        self._accept(event)
        self.next_seq += 1
        return self._add(Step(Action("publish", (event, text, data)), f"{event} by the agent's publisher"))

    def work(self, least: int = 1, most: int = 3) -> None:
        """Add the start event and a random number of progress events, from `least` to `most`."""
        self.agent(STARTED, "begins")
        for number in range(self.draw.randint(least, most)):
            self.agent(PROGRESS, done=number + 1)

    def body(self, event: str, seq: int, detail: str, **data: Any) -> dict[str, Any]:
        """Return the fields of an event of the job, without a signature. Adds no step.

        `event` is the type of the event, `seq` its number, and `detail` a text for people. `data` becomes its
        field `data`.
        """
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
        """Add an event that is sent past the publisher, with a valid signature, and that must be accepted.

        Raises ValueError if the job has ended. Afterwards `agent` cannot be used.

        Args:
            label: A text for the report.
            event: The type of the event.
            seq: Its number, which no event before had.
            detail: A text in the event.
            late: Whether a higher seq was added before.
            masked: The part that the ledger must mask; None for no such part.

        Returns:
            The step's number.
        """
        self._raw_seqs = True
        self._accept(event)
        self.next_seq = max(self.next_seq, seq + 1)
        payload = canonical(sign_event(self.body(event, seq, detail), self.actor.secret))
        action = Action("send", (self.actor.job_id, payload, event in TERMINAL_EVENTS))
        return self._add(Step(action, label, Expected(late=late, masked=masked)))

    def refused(
        self, label: str, reason: str, event: str, detail: str, seq: int | None = None, **data: Any
    ) -> None:
        """Add an event with a valid signature that must be rejected for `reason`, such as `seq_conflict`.

        `label` is a text for the report. `event` is the type of the event, and `detail` a text in it. `seq` is
        the event's number; None takes the next one. `data` are more fields of the event.
        """
        body = self.body(event, self.next_seq if seq is None else seq, detail, **data)
        self.refused_bytes(label, reason, canonical(sign_event(body, self.actor.secret)))

    def refused_bytes(self, label: str, reason: str, payload: bytes, masked: str | None = None) -> None:
        """Add the bytes `payload` on the job's MQTT topic, which must be rejected for `reason`.

        `label` is a text for the report. `masked` is the part that the ledger must mask; None for no such part.
        """
        expected = Expected(REJECTED, reason, masked=masked)
        self._add(Step(Action("send", (self.actor.job_id, payload, False)), label, expected))

    def again(self, of: int, label: str) -> int:
        """Add the bytes of the accepted step with the number `of` once more, which must be a duplicate.

        Returns the number of the new step. `of` is a number that `agent` or `signed` returned. `label` is a
        text for the report.
        """
        before = self._steps[of].expected or Expected()
        return self._add(Step(Action("send_again", (of,)), label, Expected(DUPLICATE, masked=before.masked)))

    def reworded(self, event: str, detail: str) -> None:
        """Add a signed event, then the same event with its keys in another order, which must be a duplicate."""
        seq = self.next_seq
        self.signed(f"{event}, sent past the publisher", event, seq, detail)
        signed = sign_event(self.body(event, seq, detail), self.actor.secret)
        text = "{ " + ", ".join(f"{_json(k)}: {_json(signed[k])}" for k in reversed(list(signed))) + " }"
        action = Action("send", (self.actor.job_id, text.encode("utf-8"), False))
        self._add(Step(action, "the same event, keys in another order", Expected(DUPLICATE)))

    def pick(self) -> None:
        """Add the step that the job's session picks the job. The job's state becomes running."""
        self._state = states.RUNNING
        self._add(Step(Action("pick"), "picked at the gateway", None))

    def cancel(self) -> None:
        """Add the step that the operator cancels the job. The job's state becomes cancelled."""
        self._state = states.CANCELLED
        self._add(Step(Action("cancel"), "cancelled by the operator", None))

    def _accept(self, event: str) -> None:
        if self._state in JOB_TERMINAL:
            raise ValueError("the job has ended")
        self._state = _STATE_AFTER.get(event, states.RUNNING)

    def _add(self, step: Step) -> int:
        self._steps.append(step)
        return len(self._steps) - 1


def _json(value: Any) -> str:
    return canonical(value).decode("utf-8")
