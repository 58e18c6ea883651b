"""A start finds the ledger's end, whatever others write into its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from msgspec.structs import replace
from pyspark.sql import SparkSession

from connectors.tools.audit.verification import verify
from jobs.settling.ledger_sink import LedgerSink
from jobs.settling.partition_task import LEDGER_FILE
from schemas.integrity.audit_chain import ChainLine, commit_metadata, last_in_file, newest_entry, next_entry
from tests.audited_ledger import AuditedLedger, ledger_row_at
from trunkline_agent.errors import Refused

QUERY = "the query"


@pytest.fixture
def ledger(tmp_path: Path) -> AuditedLedger:
    """Offsets 0 to 11 of partition 0, by two micro-batches, anchored."""
    made = AuditedLedger(tmp_path)
    made.commit_offsets({0: (0, 8)})
    made.commit_offsets({0: (8, 12)})
    made.keep()
    return made


def write_metadata(ledger: AuditedLedger, metadata: Any) -> None:
    """An empty commit with this userMetadata."""
    log = Path(ledger.path, "_delta_log")
    newest = max(int(file.stem) for file in log.glob("*.json"))
    action = {"commitInfo": {"timestamp": 0, "operation": "WRITE", "userMetadata": metadata}}
    (log / f"{newest + 1:020d}.json").write_text(json.dumps(action) + "\n")


def settle(spark: SparkSession, ledger: AuditedLedger, batch: int, first: int, end: int) -> None:
    """The first micro-batch of a start."""
    files = ledger.files_of([ledger_row_at(0, at) for at in range(first, end)])
    sink = LedgerSink(ledger.settings)
    assert sink.ends == {0: first}
    sink.started(QUERY)
    sink(spark.createDataFrame(files, LEDGER_FILE), batch)


def offsets_in(ledger: AuditedLedger) -> list[int]:
    return sorted(DeltaTable(ledger.path).to_pyarrow_table()["offset"].to_pylist())


def test_a_start_finds_the_ledgers_end_also_when_its_log_has_been_cleaned(
    spark: SparkSession, ledger: AuditedLedger
) -> None:
    settle(spark, ledger, 1, 12, 14)
    ledger.keep()
    ledger.forget_log()
    settle(spark, ledger, 2, 14, 15)
    ledger.keep()
    assert offsets_in(ledger) == list(range(15)) and verify(ledger.settings).findings == ()


@pytest.mark.parametrize("with_entry", [False, True])
def test_a_marker_that_somebody_wrote_makes_no_record_be_left_out(
    spark: SparkSession, ledger: AuditedLedger, with_entry: bool
) -> None:
    last = last_in_file(ledger.trail.path)
    assert last is not None
    forged = next_entry(last.entry, QUERY, 2, ["[]"])
    audit = {"audit": commit_metadata(forged)} if with_entry else {}
    write_metadata(ledger, json.dumps({"query": QUERY, "batch": 2, **audit}))
    settle(spark, ledger, 2, 12, 15)
    ledger.keep()
    assert offsets_in(ledger) == list(range(15))
    assert verify(ledger.settings).findings == ()


def test_an_entry_that_does_not_continue_the_chain_is_not_its_end(ledger: AuditedLedger) -> None:
    known = last_in_file(ledger.trail.path)
    assert known is not None
    good = next_entry(known.entry, QUERY, 2, ["[]"])
    others = [
        replace(good, previous="1" * 64),
        replace(good, number=good.number + 1),
        replace(good, number=0, previous="0" * 64),
    ]
    lines = [ChainLine(9, entry.value(), entry) for entry in others] + [ChainLine(9, "2" * 64, good)]
    assert newest_entry(known.entry, lines) == known.entry
    assert newest_entry(known.entry, [*lines, ChainLine(10, good.value(), good), *lines]) == good
    assert newest_entry(None, []) is None


@pytest.mark.parametrize(
    "metadata",
    [
        '{"note": 1}',
        "{bad",
        "[1]",
        '"x"',
        '{"query": 5, "batch": 1}',
        '{"query": "q", "batch": -1}',
        pytest.param('{"deep": ' + "[" * 3000 + "]" * 3000 + "}", id="deep"),
    ],
)
def test_what_others_write_beside_a_commit_is_passed_over(
    spark: SparkSession, ledger: AuditedLedger, metadata: Any
) -> None:
    write_metadata(ledger, metadata)
    write_metadata(ledger, json.dumps({"query": QUERY, "batch": 10**30}))
    settle(spark, ledger, 2, 12, 13)
    assert offsets_in(ledger) == list(range(13))


def test_a_ledger_from_before_there_was_a_chain_goes_on_at_its_end(spark: SparkSession, tmp_path: Path) -> None:
    ledger = AuditedLedger(tmp_path)
    ledger.plant([ledger_row_at(0, at) for at in range(3)])
    settle(spark, ledger, 0, 3, 5)
    ledger.keep()
    report = verify(ledger.settings)
    assert (report.findings, report.rows, report.rows_before_the_chain) == ((), 5, 3)


def test_a_chain_that_is_ahead_of_the_ledger_is_refused(ledger: AuditedLedger) -> None:
    log = Path(ledger.path, "_delta_log")
    newest = max(log.glob("*.json"))
    copy = newest.read_bytes()
    newest.unlink()
    with pytest.raises(Refused, match="put the newer ledger back"):
        LedgerSink(ledger.settings)
    # An old ledger was put back and has grown again, with other records.
    newest.write_bytes(copy.replace(b"userMetadata", b"otherMetadata"))
    with pytest.raises(Refused, match="put the newer ledger back"):
        LedgerSink(ledger.settings)
