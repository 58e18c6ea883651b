"""Comparison of the demo's plan with the ledger, and with the receipts that the senders of events got."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from connectors.log.ledger_files.ledger_export import LINE_COLUMNS
from connectors.tools.demo.steps import Expected, Step
from schemas.streams.job.job_registry import JOB_EVENT
from trunkline_agent.wire.ids import JOB
from trunkline_agent.wire.receipt import Receipt
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED

OUTCOME_COLUMNS: Final = (*LINE_COLUMNS, "partition", "offset", "ce_id", "status_after")
Row = dict[str, Any]


class Delivery(NamedTuple):
    """A job event that was sent: its step in the plan, its stream and its CloudEvents id."""

    step: Step
    stream: str
    ce_id: str


@dataclass(frozen=True)
class Outcome:
    """The numbers of the demo's job events in the ledger, and the differences from the plan.

    Attributes:
        sent: How many job events are in the ledger, in all.
        accepted: How many were accepted.
        duplicate: How many were duplicates.
        rejected: How many were rejected, by reason.
        jobs: How many jobs ended in each state, by state.
        differences: A text for each difference from the plan; empty if all is as planned.
    """

    sent: int
    accepted: int
    duplicate: int
    rejected: dict[str, int]
    jobs: dict[str, int]
    differences: list[str] = field(default_factory=list)


def stream_of(row: Row) -> str:
    """Return the name of the stream of a ledger row (columns by name), such as `job/0a1b2c3d`."""
    return f"{row['stream_kind']}/{row['stream_id']}"


def in_scope(rows: Iterable[Row], deliveries: Iterable[Delivery], job_ids: Iterable[str]) -> list[Row]:
    """Return those of the ledger rows `rows` that belong to this run of the demo.

    These are the rows of the jobs `job_ids`, and rows with the CloudEvents id of an event in `deliveries`. The
    ledger of a kept stack has other rows, too.
    """
    sent = {delivery.ce_id for delivery in deliveries}
    streams = {f"{JOB}/{job_id}" for job_id in job_ids}
    return [row for row in rows if stream_of(row) in streams or row["ce_id"] in sent]


def job_states(rows: Iterable[Row]) -> dict[str, str]:
    """Return the state of each job after its last accepted record, by job id.

    `rows` are ledger rows in any order. A job without an accepted record is left out.
    """
    last: dict[str, tuple[int, str]] = {}
    for row in rows:
        if row["stream_kind"] == JOB and row["verdict"] == ACCEPTED and row["status_after"] is not None:
            name = row["stream_id"]
            if name not in last or last[name][0] < row["offset"]:
                last[name] = (row["offset"], row["status_after"])
    return {name: status for name, (_, status) in last.items()}


def compare(rows: Sequence[Row], deliveries: Sequence[Delivery], states: Mapping[str, str]) -> Outcome:
    """Compare the ledger with the plan, and return the numbers and the differences.

    A difference raises nothing. MQTT may deliver a message twice. So a further duplicate of an accepted event
    is no difference, nor is a further row of a planned rejection.

    Args:
        rows: The ledger rows of this run of the demo, as `in_scope` returns them.
        deliveries: The events that were sent, with the planned verdict of each.
        states: The planned end state of each job, by job id.
    """
    events = [row for row in rows if row["type"] == JOB_EVENT]
    verdicts = Counter(row["verdict"] for row in events)
    rejected = Counter(str(row["reason"]) for row in events if row["verdict"] == REJECTED)
    found_states = job_states(rows)
    differences = [
        *_message_differences(events, deliveries),
        *_untraced_duplicates(events),
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
    planned: dict[str, Counter[Expected]] = defaultdict(Counter)
    names: dict[str, str] = {}
    for delivery in deliveries:
        planned[delivery.ce_id][delivery.step.expected or Expected()] += 1
        names.setdefault(delivery.ce_id, f"{delivery.stream}, {delivery.step.label}")
    found: dict[str, Counter[Expected]] = defaultdict(Counter)
    for row in events:
        found[row["ce_id"]][Expected(row["verdict"], row["reason"], row["late"], row["masked"])] += 1
        names.setdefault(row["ce_id"], f"{stream_of(row)}, seq {row['seq']}, sent by nobody")
    differences = []
    for ce_id, name in names.items():
        missing = planned[ce_id] - found[ce_id]
        surplus = found[ce_id] - planned[ce_id]
        if planned[ce_id]:
            surplus = Counter({e: n for e, n in surplus.items() if not _may_come_again(e, planned[ce_id])})
        if missing or surplus:
            instead = _counted(surplus)
            differences.append(f"{name}: planned {_counted(missing)}, the ledger has {instead} instead")
    return differences


def _may_come_again(found: Expected, planned: Counter[Expected]) -> bool:
    return found.verdict == DUPLICATE or (found.verdict == REJECTED and found in planned)


def _counted(counted: Counter[Expected]) -> str:
    parts = [f"{expected}" + (f" {count} times" if count > 1 else "") for expected, count in counted.items()]
    return " and ".join(parts) or "nothing more"


def _untraced_duplicates(events: Sequence[Row]) -> list[str]:
    accepted = {_identity(row) for row in events if row["verdict"] == ACCEPTED}
    return [
        f"{stream_of(row)}, seq {row['seq']}: a duplicate of no accepted event"
        for row in events
        if row["verdict"] == DUPLICATE and _identity(row) not in accepted
    ]


def _identity(row: Row) -> tuple[str, int | None, bytes | None]:
    """Return stream, seq and content of an event. Equal ones are the same event."""
    content: bytes | None = row["value"]
    with suppress(MalformedJsonError):
        content = canonical(decode(content or b"")[0])
    return stream_of(row), row["seq"], content


def _state_differences(found: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    return [
        f"job {job_id}: planned to be {planned.get(job_id, 'unknown')}, it is {found.get(job_id, 'unknown')}"
        for job_id in sorted({*found, *planned})
        if found.get(job_id) != planned.get(job_id)
    ]


@dataclass(frozen=True)
class ReceiptReport:
    """The numbers of the receipts that the senders of events got.

    Attributes:
        verdicts: How many receipts had a verdict, by verdict.
        durable: How many came before the verdict and say only that Kafka has the event.
        rejections: By reason, how many rejected rows there are whose sender got the reason.
        differences: A text for each difference from the ledger.
    """

    verdicts: dict[str, int]
    durable: int
    rejections: dict[str, int]
    differences: list[str]


def check_receipts(receipts: Mapping[str, Sequence[Receipt]], rows: Sequence[Row]) -> ReceiptReport:
    """Count the receipts by verdict, and those without one; compare them with the ledger.

    A difference raises nothing. It is a difference if a receipt has another verdict than the ledger, or if
    there are receipts but none has a verdict. The report also counts, by reason, the events that ledger and
    receipt reject. A receipt of an event that the ledger does not have is counted, and not compared.

    Args:
        receipts: The receipts that came, by CloudEvents id of the event.
        rows: The ledger rows of this run of the demo.
    """
    every = [receipt for found in receipts.values() for receipt in found]
    verdicts = Counter(receipt.verdict for receipt in every if receipt.verdict is not None)
    events = [row for row in rows if row["type"] == JOB_EVENT]
    settled: dict[str, set[tuple[str, str | None]]] = defaultdict(set)
    for row in events:
        settled[row["ce_id"]].add((row["verdict"], row["reason"]))
    reported = {(receipt.ce_id, receipt.verdict, receipt.reason) for receipt in every}
    differences = [
        f"a receipt said {receipt.verdict} {receipt.reason or ''}".rstrip() + ", the ledger does not"
        for receipt in every
        if receipt.verdict is not None
        and receipt.ce_id in settled
        and (receipt.verdict, receipt.reason) not in settled[receipt.ce_id]
    ]
    if every and not verdicts:
        differences.append("no receipt had a verdict: the bridge got no verdicts from the gateway")
    rejections = Counter(
        str(row["reason"])
        for row in events
        if row["verdict"] == REJECTED and (row["ce_id"], REJECTED, row["reason"]) in reported
    )
    durable = len(every) - sum(verdicts.values())
    return ReceiptReport(dict(sorted(verdicts.items())), durable, dict(rejections), differences)
