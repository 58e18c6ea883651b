"""The demo's plan: the messages that are sent, and the rows that the ledger must have afterwards.

The same arguments give the same plan. A test runs the fold over it and compares the verdicts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from connectors.demo.roles import PLAIN_ROLES, ROLES
from connectors.demo.steps import Actor, Cancellation, Pick, RawMessage, Script, ScriptBuilder, Step
from schemas.streams.job.job_event import PROGRESS, STARTED
from schemas.wire.signing import sign_event
from schemas.wire.strict_json import canonical
from schemas.wire.verdicts import MALFORMED, REJECTED, UNKNOWN_STREAM

JOBS_LEAST: Final = len(ROLES)
# The largest of the malformed bodies must not be over the limit.
PAYLOAD_LIMIT_LEAST_BYTES: Final = 32 * 1024
_BAD_TOPIC_IDS: Final = ("NOT-A-JOB", "DEADBEEF", "0a1b2c3d4", "..")


@dataclass(frozen=True)
class Plan:
    """Scripts that are played at the same time. Each is played in its own order."""

    scripts: tuple[Script, ...]

    def steps(self) -> Iterator[tuple[Script, Step]]:
        """Yield all steps that send a job event, with their script."""
        for script in self.scripts:
            for step in script.steps:
                if not isinstance(step.action, Cancellation | Pick):
                    yield script, step

    @property
    def sent(self) -> int:
        """The number of job events that are sent."""
        return sum(1 for _ in self.steps())

    @property
    def verdicts(self) -> Counter[str]:
        """The number of job events by verdict."""
        return Counter(step.verdict for _, step in self.steps())

    @property
    def rejected(self) -> Counter[str]:
        """The number of rejected job events by reason."""
        return Counter(str(step.reason) for _, step in self.steps() if step.verdict == REJECTED)

    @property
    def states(self) -> dict[str, str]:
        """The state in which each registered job ends."""
        return {s.actor.job_id: s.state for s in self.scripts if s.actor is not None and s.state is not None}


def build_plan(
    actors: Sequence[Actor], stranger: Actor, *, seed: int, sent_at: str, payload_limit_bytes: int
) -> Plan:
    """Return the plan for registered jobs (at least `JOBS_LEAST`) and a stranger that is not registered.

    `sent_at` (ISO 8601, UTC, Z) is the timestamp of events that are made without a publisher. Raises ValueError
    for too few jobs or a limit below `PAYLOAD_LIMIT_LEAST_BYTES`.
    """
    if payload_limit_bytes < PAYLOAD_LIMIT_LEAST_BYTES:
        raise ValueError(f"the plan needs a payload limit of {PAYLOAD_LIMIT_LEAST_BYTES} bytes or more")
    if len(actors) < JOBS_LEAST:
        raise ValueError(f"the plan needs {JOBS_LEAST} jobs, one for each role")
    draw = random.Random(seed)  # noqa: S311  variety, no secret
    roles = list(ROLES)
    roles += [draw.choice(PLAIN_ROLES) for _ in range(len(actors) - len(roles))]
    draw.shuffle(roles)
    scripts = []
    for actor, role in zip(actors, roles, strict=True):
        title = (role.__doc__ or "").rstrip(".")
        job = ScriptBuilder(
            title, actor, draw, sent_at, forger_secret=stranger.secret, limit_bytes=payload_limit_bytes
        )
        role(job)
        scripts.append(job.script())
    scripts.append(_unregistered(stranger, draw, sent_at))
    scripts.append(_bad_topics(stranger, draw, sent_at))
    return Plan(tuple(scripts))


def _unregistered(stranger: Actor, draw: random.Random, sent_at: str) -> Script:
    job = ScriptBuilder("", stranger, draw, sent_at)
    job.refused("started by a job that is not registered", UNKNOWN_STREAM, STARTED, "begins")
    job.refused("progress of a job that is not registered", UNKNOWN_STREAM, PROGRESS, "goes on", 2)
    return Script("Was never registered", None, job.script().steps, None)


def _bad_topics(stranger: Actor, draw: random.Random, sent_at: str) -> Script:
    job = ScriptBuilder("", stranger, draw, sent_at)
    steps = []
    for seq, topic_id in enumerate(_BAD_TOPIC_IDS, 1):
        payload = canonical(sign_event(job.body(PROGRESS, seq, "to nowhere"), stranger.secret))
        label = f"{topic_id!r} for a job id in the topic"
        steps.append(Step(RawMessage(topic_id, payload), label, REJECTED, MALFORMED))
    return Script("Has a job id that is none", None, tuple(steps), None)
