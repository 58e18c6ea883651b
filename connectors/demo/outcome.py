"""Compares what the ledger holds with what was planned, and names each difference."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from connectors.demo.steps import Step
from schemas.wire.ids import JOB
from schemas.wire.record import JOB_EVENT
from schemas.wire.strict_json import MalformedJsonError, canonical, decode
from schemas.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED

OUTCOME_COLUMNS: Final = (
    "partition",
    "offset",
    "stream_kind",
    "stream_id",
    "ce_id",
    "type",
    "seq",
    "logged_at",
    "verdict",
    "reason",
    "why",
    "late",
    "masked",
    "status_after",
    "value",
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Delivery:
    """A job event that was sent: the step it came of, its stream and its CloudEvents id."""

    step: Step
    stream: str
    ce_id: str


class _Expected(NamedTuple):
    verdict: str
    reason: str | None
    late: bool
    masked: str | None

    def __str__(self) -> str:
        marks = [self.verdict, self.reason, "late" if self.late else None]
        return " ".join(m for m in marks if m) + (f" (masked: {self.masked})" if self.masked else "")


@dataclass(frozen=True)
class Outcome:
    """What the ledger holds of the demo's job events, and how that differs from the plan."""

    sent: int
    accepted: int
    duplicate: int
    rejected: dict[str, int]
    jobs: dict[str, int]
    differences: list[str] = field(default_factory=list)


def stream_of(row: Row) -> str:
    """The stream of a ledger row, as its Kafka key names it."""
    return f"{row['stream_kind']}/{row['stream_id']}"


def in_scope(rows: Iterable[Row], deliveries: Iterable[Delivery], job_ids: Iterable[str]) -> list[Row]:
    """The rows that are the demo's own: of its streams, or with the id of a message it sent. An older ledger
    holds others, too.
    """
    sent = {delivery.ce_id for delivery in deliveries}
    streams = {f"{JOB}/{job_id}" for job_id in job_ids}
    return [row for row in rows if stream_of(row) in streams or row["ce_id"] in sent]


def still_missing(rows: Iterable[Row], deliveries: Iterable[Delivery]) -> int:
    """How many deliveries have no row of their own yet."""
    landed = Counter(row["ce_id"] for row in rows if row["type"] == JOB_EVENT)
    wanted = Counter(delivery.ce_id for delivery in deliveries)
    return sum((wanted - landed).values())


def job_states(rows: Iterable[Row]) -> dict[str, str]:
    """The state of each job after its last accepted record. The rows of one job are in one partition."""
    last: dict[str, tuple[int, str]] = {}
    for row in rows:
        if row["stream_kind"] == JOB and row["verdict"] == ACCEPTED and row["status_after"] is not None:
            name = row["stream_id"]
            if name not in last or last[name][0] < row["offset"]:
                last[name] = (row["offset"], row["status_after"])
    return {name: status for name, (_, status) in last.items()}


def compare(rows: Sequence[Row], deliveries: Sequence[Delivery], states: Mapping[str, str]) -> Outcome:
    """What `rows` (those in scope) hold, against what was sent and the states that the jobs must end in.

    Every job event in the ledger counts: sent = accepted + duplicate + rejected. MQTT may deliver twice, so
    more duplicates than planned are no difference, if each has its accepted event, nor is a planned rejection
    that is there once more.
    """
    events = [row for row in rows if row["type"] == JOB_EVENT]
    verdicts = Counter(row["verdict"] for row in events)
    rejected = Counter(str(row["reason"]) for row in events if row["verdict"] == REJECTED)
    found_states = job_states(rows)
    differences = [
        *_message_differences(events, deliveries),
        *_untraced_duplicates(events),
        *_count_differences(verdicts, rejected - _redelivered(events, deliveries), deliveries),
        *_state_differences(found_states, states),
    ]
    return Outcome(
        sent=len(events),
        accepted=verdicts[ACCEPTED],
        duplicate=verdicts[DUPLICATE],
        rejected=dict(sorted(rejected.items())),
        jobs=dict(sorted(Counter(found_states.values()).items())),
        differences=differences,
    )


def _message_differences(events: Sequence[Row], deliveries: Sequence[Delivery]) -> list[str]:
    planned: dict[str, Counter[_Expected]] = defaultdict(Counter)
    names: dict[str, str] = {}
    for delivery in deliveries:
        step = delivery.step
        planned[delivery.ce_id][_Expected(step.verdict, step.reason, step.late, step.masked)] += 1
        names.setdefault(delivery.ce_id, f"{delivery.stream}, {step.label}")
    found: dict[str, Counter[_Expected]] = defaultdict(Counter)
    for row in events:
        found[row["ce_id"]][_Expected(row["verdict"], row["reason"], row["late"], row["masked"])] += 1
        names.setdefault(row["ce_id"], f"{stream_of(row)}, seq {row['seq']}, sent by nobody")
    differences = []
    for ce_id, name in names.items():
        missing = planned[ce_id] - found[ce_id]
        surplus = found[ce_id] - planned[ce_id]
        if planned[ce_id]:
            surplus = Counter({e: n for e, n in surplus.items() if not _may_come_again(e, planned[ce_id])})
        if missing or surplus:
            differences.append(f"{name}: planned {_told(missing)}, the ledger has {_told(surplus)} instead")
    return differences


def _may_come_again(found: _Expected, planned: Counter[_Expected]) -> bool:
    return found.verdict == DUPLICATE or (found.verdict == REJECTED and found in planned)


def _redelivered(events: Sequence[Row], deliveries: Sequence[Delivery]) -> Counter[str]:
    """Of each reason, the rows beyond the plan whose message was planned to be rejected for it."""
    planned = Counter((d.ce_id, d.step.reason) for d in deliveries if d.step.verdict == REJECTED)
    found = Counter((row["ce_id"], row["reason"]) for row in events if row["verdict"] == REJECTED)
    surplus: Counter[str] = Counter()
    for identity, times in found.items():
        if planned[identity]:
            surplus[str(identity[1])] += max(0, times - planned[identity])
    return surplus


def _told(counted: Counter[_Expected]) -> str:
    parts = [f"{expected}" + (f" {count} times" if count > 1 else "") for expected, count in counted.items()]
    return " and ".join(parts) or "nothing more"


def _untraced_duplicates(events: Sequence[Row]) -> list[str]:
    accepted = {
        (stream_of(row), row["seq"], _content(row["value"])) for row in events if row["verdict"] == ACCEPTED
    }
    return [
        f"{stream_of(row)}, seq {row['seq']}: a duplicate of no accepted event"
        for row in events
        if row["verdict"] == DUPLICATE and (stream_of(row), row["seq"], _content(row["value"])) not in accepted
    ]


def _content(value: bytes | None) -> bytes | None:
    if value is None:
        return None
    try:
        return canonical(decode(value)[0])
    except MalformedJsonError:
        return value


def _count_differences(
    verdicts: Counter[str], rejected: Counter[str], deliveries: Sequence[Delivery]
) -> list[str]:
    planned = Counter(delivery.step.verdict for delivery in deliveries)
    reasons = Counter(str(d.step.reason) for d in deliveries if d.step.verdict == REJECTED)
    differences = []
    if verdicts[ACCEPTED] != planned[ACCEPTED]:
        differences.append(f"accepted: planned {planned[ACCEPTED]}, the ledger has {verdicts[ACCEPTED]}")
    if verdicts[DUPLICATE] < planned[DUPLICATE]:
        told = f"duplicate: planned at least {planned[DUPLICATE]}, the ledger has {verdicts[DUPLICATE]}"
        differences.append(told)
    for reason in sorted(reasons | rejected):
        if rejected[reason] != reasons[reason]:
            told = f"rejected as {reason}: planned {reasons[reason]}, the ledger has {rejected[reason]}"
            differences.append(told)
    return differences


def _state_differences(found: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    return [
        f"job {job_id}: planned to be {planned.get(job_id, 'unknown')}, it is {found.get(job_id, 'unknown')}"
        for job_id in sorted({*found, *planned})
        if found.get(job_id) != planned.get(job_id)
    ]
