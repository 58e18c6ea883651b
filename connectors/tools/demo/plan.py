"""The demo's plan. A role, such as `completes`, adds the steps in its docstring to the script of one job.

The plan has the messages that are sent, and the rows that the ledger must have afterwards. Each job plays a
role: an ordinary life, or a kind of trouble. A role's docstring is its title in the report, so it has one line.
The same arguments give the same plan. A test runs the fold over it and compares the verdicts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from connectors.tools.demo.steps import Action, Actor, Expected, Script, ScriptBuilder, Step
from trunkline_agent.wire.job_event import COMPLETED, ERROR, PERMISSION_REQUIRED, PROGRESS, STARTED
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import MAX_DEPTH, canonical
from trunkline_agent.wire.unsafe_text import AUTH_TOKEN, DETAIL, WHOLE_VALUE
from trunkline_agent.wire.verdicts import (
    AFTER_TERMINAL,
    BAD_SIGNATURE,
    ILLEGAL_TRANSITION,
    MALFORMED,
    REJECTED,
    SCHEMA_VERSION,
    SECRET_IN_EVENT,
    SEQ_CONFLICT,
    TOO_LARGE,
    UNKNOWN_STREAM,
)

TOKEN_FIELD: Final = AUTH_TOKEN.removeprefix("data.")
# Of the malformed bodies, the only one that the ledger masks, and as a whole: it has an escape.
_MASKED_BODY: Final = "a lone surrogate"
_DEEP: Final = 5000
Role = Callable[[ScriptBuilder], None]


def completes(job: ScriptBuilder) -> None:
    """Work and complete."""
    job.work()
    job.agent(COMPLETED, "all done")


def is_picked(job: ScriptBuilder) -> None:
    """Get picked by a session at the gateway and complete, which also ends the session."""
    job.pick()
    completes(job)


def fails(job: ScriptBuilder) -> None:
    """Work and end with an error."""
    job.work()
    job.agent(ERROR, "the last check failed")


def waits(job: ScriptBuilder) -> None:
    """Ask for permission, and still wait for it at the demo's end."""
    job.work()
    job.agent(PERMISSION_REQUIRED, "publish the report")


def idles(job: ScriptBuilder) -> None:
    """Stay registered, because no session picks the job."""


def is_cancelled(job: ScriptBuilder) -> None:
    """Get cancelled by the operator, and send an event afterwards, which is rejected."""
    job.work()
    job.cancel()
    job.refused("an event after the cancellation", AFTER_TERMINAL, PROGRESS, "still at it")


def is_redelivered(job: ScriptBuilder) -> None:
    """Have events sent again by another connection, also after the end; they are duplicates."""
    first = job.agent(STARTED, "begins")
    job.again(first, "started, redelivered")
    second = job.agent(PROGRESS, done=1)
    job.again(second, "progress, redelivered")
    job.again(second, "progress, redelivered once more")
    last = job.agent(COMPLETED, "all done")
    job.again(first, "started, redelivered after the end")
    job.again(last, "the end, redelivered")


def is_reworded(job: ScriptBuilder) -> None:
    """Send the same event again in other bytes, which is a duplicate."""
    job.work()
    job.reworded(PROGRESS, "said twice")
    job.signed("the end, sent past the publisher", COMPLETED, job.next_seq, "all done")


def is_reordered(job: ScriptBuilder) -> None:
    """Send two events in the wrong order; both are accepted, and the second one counts as late."""
    job.work()
    seq = job.next_seq
    job.signed("the later one of a reordered pair", PROGRESS, seq + 1, "the second, first")
    job.signed("the earlier one of a reordered pair", PROGRESS, seq, "the first, second", late=True)
    job.signed("the end, sent past the publisher", COMPLETED, seq + 2, "all done")


def contradicts_itself(job: ScriptBuilder) -> None:
    """Have two agents with one secret send different events under the same seq; the second is rejected."""
    job.work()
    seq = job.next_seq
    job.agent(PROGRESS, "one of two that share a secret", copy=1)
    label = "the same seq with other content, well signed"
    job.refused(label, SEQ_CONFLICT, PROGRESS, "the other one", seq, copy=2)
    job.agent(COMPLETED, "all done")


def is_forged(job: ScriptBuilder) -> None:
    """Have a client without the secret declare the job done, which is rejected."""
    job.work()
    fake = sign_event(job.body(COMPLETED, job.next_seq, "all done, believe me"), job.forger_secret)
    job.refused_bytes("a forged signature", BAD_SIGNATURE, canonical(fake))
    changed = job.body(COMPLETED, job.next_seq, "all done", hmac_sig="0" * 64)
    job.refused_bytes("a made-up signature", BAD_SIGNATURE, canonical(changed))
    job.agent(ERROR, "not done at all")


def is_unsigned(job: ScriptBuilder) -> None:
    """Send an event without a signature, and one whose signature is null; both are rejected."""
    job.work()
    plain = job.body(PROGRESS, job.next_seq, "not signed")
    job.refused_bytes("no signature", BAD_SIGNATURE, canonical(plain))
    odd = job.body(PROGRESS, job.next_seq, "not signed", hmac_sig=None)
    job.refused_bytes("null for a signature", BAD_SIGNATURE, canonical(odd))
    job.agent(COMPLETED, "all done")


def speaks_another_version(job: ScriptBuilder) -> None:
    """Send well signed events of a schema version that does not exist; they are rejected."""
    job.work()
    for version in (0, 2):
        body = {**job.body(PROGRESS, job.next_seq, "from elsewhere"), "schema_version": version}
        signed = canonical(sign_event(body, job.actor.secret))
        job.refused_bytes(f"schema_version {version}", SCHEMA_VERSION, signed)
    job.agent(COMPLETED, "all done")


def stammers(job: ScriptBuilder) -> None:
    """Send each kind of malformed body once; all are rejected."""
    job.work()
    for label, payload in malformed_bodies(job.body(PROGRESS, job.next_seq, "not readable")).items():
        masked = WHOLE_VALUE if label == _MASKED_BODY else None
        job.refused_bytes(f"malformed: {label}", MALFORMED, payload, masked)
    job.agent(COMPLETED, "all done")


def talks_too_much(job: ScriptBuilder) -> None:
    """Send a body over the limit, which is rejected; only its size, hash and first 1 KiB are logged."""
    job.work()
    job.refused("a body over the limit", TOO_LARGE, PROGRESS, "far too much", text="x" * job.limit_bytes)
    job.agent(COMPLETED, "all done")


def shows_a_path(job: ScriptBuilder) -> None:
    """Send a path and a password in the details of signed events: they are accepted and masked."""
    job.work()
    unsafe = job.signed(
        "a path in the detail", PROGRESS, job.next_seq, "wrote /home/ann/report.txt", masked=DETAIL
    )
    job.again(unsafe, "a path in the detail, redelivered")
    job.signed("a password in the last detail", COMPLETED, job.next_seq, "password: hunter2", masked=DETAIL)


def sends_its_token(job: ScriptBuilder) -> None:
    """Send a token inside a well signed event, which is rejected."""
    job.work()
    body = job.body(PROGRESS, job.next_seq, "with a token", **{TOKEN_FIELD: "not a real one"})
    signed = canonical(sign_event(body, job.actor.secret))
    job.refused_bytes("a token in data.auth_token", SECRET_IN_EVENT, signed, masked=AUTH_TOKEN)
    job.agent(COMPLETED, "all done")


def goes_on(job: ScriptBuilder) -> None:
    """Send events after the end, which are rejected; the end itself, sent again, is a duplicate."""
    job.work(least=2)
    last = job.agent(COMPLETED, "all done")
    job.again(last, "the end, redelivered")
    job.refused("progress after the end", AFTER_TERMINAL, PROGRESS, "one more thing")
    job.refused("a second end", AFTER_TERMINAL, ERROR, "or rather not", job.next_seq + 1)


def starts_late(job: ScriptBuilder) -> None:
    """Send a second start event in the middle of the work, which is rejected."""
    job.work()
    job.refused("started with another seq than 1", ILLEGAL_TRANSITION, STARTED, "begins anew")
    job.agent(COMPLETED, "all done")


ROLES: Final[tuple[Role, ...]] = (
    is_picked,
    is_redelivered,
    is_reordered,
    contradicts_itself,
    is_forged,
    is_unsigned,
    speaks_another_version,
    stammers,
    talks_too_much,
    shows_a_path,
    sends_its_token,
    goes_on,
    starts_late,
    is_reworded,
    is_cancelled,
    fails,
    waits,
    idles,
)
PLAIN_ROLES: Final[tuple[Role, ...]] = (completes, completes, fails, waits)


def malformed_bodies(good: dict[str, Any]) -> dict[str, bytes]:
    """Return one malformed body of each kind, by a label for the report that names the fault.

    `good` has the fields of a valid event, from which the bodies are made. Most bodies are invalid JSON or
    beyond the limits for JSON (CM-02). The others have an invalid field of an event.
    """
    text = canonical(good)
    return {
        "an empty body": b"",
        "cut off in the middle": text[: len(text) // 2],
        "no JSON at all": b"done!",
        "a list, not an object": b"[" + text + b"]",
        "a key twice": b'{"seq":1,' + text[1:],
        "NaN": _with(text, b"NaN"),
        "a number beyond the largest float": _with(text, b"1e999"),
        "an integer beyond 64 bits": _with(text, b"9223372036854775808"),
        _MASKED_BODY: _with(text, b'"\\ud800"'),
        "invalid UTF-8": _with(text, b'"\xff\xfe"'),
        "nested one level too deep": _with(text, _nested(MAX_DEPTH)),
        "nested 5,000 deep": _with(text, _nested(_DEEP)),
        "the id of another job": canonical({**good, "job_id": "ffffffff"}),
        "seq 0": canonical({**good, "seq": 0}),
        "an unknown event": canonical({**good, "event": "finished"}),
        "a local time": canonical({**good, "timestamp": "2026-11-21T10:00:00+01:00"}),
        "a line break in the detail": canonical({**good, "detail": "one\ntwo"}),
        "a detail of 501 characters": canonical({**good, "detail": "x" * 501}),
    }


def _with(text: bytes, value: bytes) -> bytes:
    return text[:-1] + b',"odd":' + value + b"}"


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


JOBS_LEAST: Final = len(ROLES)
# The largest of the malformed bodies must not be over the limit.
PAYLOAD_LIMIT_LEAST_BYTES: Final = 32 * 1024
_BAD_TOPIC_IDS: Final = ("NOT-A-JOB", "DEADBEEF", "0a1b2c3d4", "..")


@dataclass(frozen=True)
class Plan:
    """The scripts of all jobs of a run. They are played at the same time, and each in its own order."""

    scripts: tuple[Script, ...]

    def steps(self) -> Iterator[tuple[Script, Step]]:
        """Yield each step that sends a job event, as a pair of its script and the step."""
        for script in self.scripts:
            for step in script.steps:
                if step.expected is not None:
                    yield script, step

    @property
    def sent(self) -> int:
        """The number of job events that the plan sends."""
        return sum(1 for _ in self.steps())

    @property
    def states(self) -> dict[str, str]:
        """The state that each registered job must have at the end, by job id."""
        return {s.actor.job_id: s.state for s in self.scripts if s.actor is not None and s.state is not None}


def build_plan(
    actors: Sequence[Actor], stranger: Actor, *, seed: int, sent_at: str, payload_limit_bytes: int
) -> Plan:
    """Assign a role to each job, and return the plan with the scripts of all jobs. Nothing is sent.

    Args:
        actors: The registered jobs, at least `JOBS_LEAST`.
        stranger: A job that is not registered. All its events must be rejected.
        seed: The seed of the random choices. The same arguments give the same plan.
        sent_at: The timestamp (ISO 8601, UTC, Z) of events that no publisher makes.
        payload_limit_bytes: The stack's limit for a payload. The plan exceeds it once.

    Raises:
        ValueError: There are too few jobs, or the limit is below `PAYLOAD_LIMIT_LEAST_BYTES`.
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
    return Plan((*scripts, *_strangers(ScriptBuilder("", stranger, draw, sent_at))))


def _strangers(job: ScriptBuilder) -> Iterator[Script]:
    job.refused("started by a job that is not registered", UNKNOWN_STREAM, STARTED, "begins")
    job.refused("progress of a job that is not registered", UNKNOWN_STREAM, PROGRESS, "goes on", 2)
    yield Script("Was never registered", None, job.script().steps, None)
    steps = []
    for seq, topic_id in enumerate(_BAD_TOPIC_IDS, 1):
        payload = canonical(sign_event(job.body(PROGRESS, seq, "to nowhere"), job.actor.secret))
        label = f"{topic_id!r} for a job id in the topic"
        steps.append(Step(Action("send", (topic_id, payload, False)), label, Expected(REJECTED, MALFORMED)))
    yield Script("Has a job id that is none", None, tuple(steps), None)
