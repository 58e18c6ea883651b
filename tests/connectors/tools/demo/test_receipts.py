"""Receipts of the demo: counts, reported rejections, and contradictions with the ledger."""

from __future__ import annotations

from typing import Any

from connectors.tools.demo.outcome import check_receipts
from trunkline_agent.wire.receipt import Receipt


def row(ce_id: str, verdict: str, reason: str | None = None) -> dict[str, Any]:
    return {"ce_id": ce_id, "type": "job.event", "verdict": verdict, "reason": reason}


ROWS = [
    row("a", "accepted"),
    row("a", "duplicate"),
    row("b", "rejected", "bad_signature"),
    row("c", "rejected", "bad_signature"),
]


def test_receipts_are_counted_and_those_without_a_verdict_apart() -> None:
    receipts = {
        "a": [Receipt("a", 1, "accepted"), Receipt("a", 1, "duplicate")],
        "b": [Receipt("b", 2, "rejected", "bad_signature")],
        "c": [Receipt("c", 3)],
    }
    report = check_receipts(receipts, ROWS)
    assert report.verdicts == {"accepted": 1, "duplicate": 1, "rejected": 1}
    assert (report.durable, report.rejections, report.differences) == (1, {"bad_signature": 1}, [])


def test_a_receipt_that_contradicts_the_ledger_is_named() -> None:
    for verdict, reason in (("accepted", None), ("rejected", "malformed")):
        report = check_receipts({"b": [Receipt("b", 2, verdict, reason)]}, ROWS)
        assert [difference.startswith("a receipt said") for difference in report.differences] == [True]
        assert report.rejections == {}


def test_receipts_that_all_lack_a_verdict_are_a_difference() -> None:
    report = check_receipts({"a": [Receipt("a", 1)]}, ROWS)
    assert report.differences == ["no receipt had a verdict: the bridge got no verdicts from the gateway"]
