"""What the receipts of the demo told the senders, held against the ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connectors.mqtt_link.receipt import Receipt
from schemas.wire.record import JOB_EVENT
from schemas.wire.verdicts import REJECTED


@dataclass(frozen=True)
class Told:
    """`verdicts`: receipts by verdict; `durable`: those that came before the verdict and say only that Kafka
    has the event. `rejections`: by reason, the rejected rows whose sender was told so.
    """

    verdicts: dict[str, int]
    durable: int
    rejections: dict[str, int]
    differences: list[str]


def told_verdicts(receipts: Mapping[str, Sequence[Receipt]], rows: Sequence[dict[str, Any]]) -> Told:
    """Count the receipts. A difference is a verdict that the ledger does not hold for this event, and that no
    receipt at all had one.
    """
    every = [receipt for found in receipts.values() for receipt in found]
    verdicts = Counter(receipt.verdict for receipt in every if receipt.verdict is not None)
    events = [row for row in rows if row["type"] == JOB_EVENT]
    settled: dict[str, set[tuple[str, str | None]]] = defaultdict(set)
    for row in events:
        settled[row["ce_id"]].add((row["verdict"], row["reason"]))
    said = {(receipt.ce_id, receipt.verdict, receipt.reason) for receipt in every}
    differences = [
        f"a receipt said {receipt.verdict} {receipt.reason or ''}".rstrip() + ", the ledger does not"
        for receipt in every
        if receipt.verdict is not None
        and receipt.ce_id in settled
        and (receipt.verdict, receipt.reason) not in settled[receipt.ce_id]
    ]
    if every and not verdicts:
        differences.append("no receipt had a verdict: the bridge heard nothing from the gateway")
    rejections = Counter(
        str(row["reason"])
        for row in events
        if row["verdict"] == REJECTED and (row["ce_id"], REJECTED, row["reason"]) in said
    )
    return Told(
        dict(sorted(verdicts.items())), len(every) - sum(verdicts.values()), dict(rejections), differences
    )
