"""An auditor sees all rows, whatever log, footers and chain say of them, and says where those are wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from deltalake import DeltaTable
from msgspec.structs import replace

from connectors.cli.main import main
from connectors.tools.audit.statistics_check import Bounds, Said, Seen, contradiction
from connectors.tools.audit.verification import Report, verify
from jobs.ledger.ledger_table import FileStatistics
from jobs.maintain_tables import tidy_ledger
from schemas.integrity.audit_anchors import anchors_file
from schemas.integrity.audit_chain import ChainLine, commit_metadata, last_in_file, lines_in_file, next_entry
from schemas.settings.settings import settings_environment
from schemas.tables.arrow_tables import LEDGER_ARROW, ledger_batch
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LedgerRow
from tests.audited_ledger import AuditedLedger, ledger_row_at, three_commits

pytestmark = pytest.mark.long


@pytest.fixture
def ledger(tmp_path: Path) -> AuditedLedger:
    """Offsets 0 to 11, 0 to 2 and 0 to 1 of three partitions, by three commits, anchored."""
    return three_commits(tmp_path)


def wrong(ledger: AuditedLedger, **options: Any) -> list[tuple[str, int | None, int | None, int | None]]:
    """Return the findings: kind, partition, first and last offset."""
    return [(f.what.value, f.partition, f.first, f.last) for f in checked(ledger, **options).findings]


def checked(ledger: AuditedLedger, **options: Any) -> Report:
    return verify(ledger.settings, **options)


def write_commit(ledger: AuditedLedger, *actions: dict[str, Any]) -> None:
    """A commit as anybody can write it into the log."""
    log = Path(ledger.path, "_delta_log")
    newest = max(int(file.stem) for file in log.glob("*.json"))
    lines = [json.dumps(action) + "\n" for action in actions]
    (log / f"{newest + 1:020d}.json").write_text("".join(lines))


def actions_of(ledger: AuditedLedger, kind: str) -> list[dict[str, Any]]:
    """The actions of a kind in the log, the oldest first."""
    log = sorted(Path(ledger.path, "_delta_log").glob("*.json"))
    found = [json.loads(line) for file in log for line in file.read_text().splitlines()]
    return [action[kind] for action in found if kind in action]


def add_file(ledger: AuditedLedger, rows: pa.RecordBatch, name: str, **other: Any) -> None:
    """A file of these rows, with a commit that names it truly."""
    path = Path(ledger.path, name)
    parquet.write_table(pa.Table.from_batches([rows]), path, store_schema=False)
    statistics = FileStatistics()
    statistics.add(rows)
    add = {"path": quote(name), "size": path.stat().st_size, "partitionValues": {}, "modificationTime": 0}
    write_commit(ledger, {"add": {**add, "dataChange": True, "stats": statistics.to_json(), **other}})


def said_anew(ledger: AuditedLedger, **statistics: Any) -> None:
    """The first file again, with other words about it."""
    add = actions_of(ledger, "add")[0]
    known = json.loads(add["stats"])
    for kind, values in statistics.items():
        known[kind] = {**known[kind], **values} if isinstance(values, dict) else values
    write_commit(ledger, {"add": {**add, "stats": json.dumps(known)}})


def batch_of(*rows: LedgerRow) -> pa.RecordBatch:
    return ledger_batch(rows)


def test_no_number_of_copies_of_a_row_counts_as_one(ledger: AuditedLedger) -> None:
    forged = batch_of(ledger_row_at(0, 3, verdict="rejected", principal="mallory"))
    copies = pa.Table.from_batches([forged]).take([0] * 65_536).combine_chunks().to_batches()[0]
    add_file(ledger, copies, "a.parquet")
    assert wrong(ledger) == [("row_twice", 0, 3, 3)]
    assert checked(ledger).rows == 17 + 65_536


@pytest.mark.parametrize("window_rows", [4, 4_000_000])
@pytest.mark.parametrize("offsets", [(4, 5), (-5,), (-(2**63), 2**63 - 1)])
def test_a_row_that_no_entry_covers_is_found_wherever_it_lies(
    tmp_path: Path, offsets: Sequence[int], window_rows: int
) -> None:
    ledger = AuditedLedger(tmp_path)
    ledger.commit_offsets({0: (0, 4)})
    ledger.commit_offsets({0: (6, 9)}, leaves_out=True)
    ledger.keep()
    gap = ("never_settled", 0, 4, 5)
    assert wrong(ledger, window_rows=window_rows) == [gap]
    moment = 1_790_000_000_000_000
    add_file(ledger, batch_of(*(ledger_row_at(0, at, logged_at=moment) for at in offsets)), "a.parquet")
    runs = [("row_added", 0, offsets[0], offsets[-1])]
    if offsets[-1] - offsets[0] > 1:
        runs = [("row_added", 0, at, at) for at in offsets]
    assert sorted(map(str, wrong(ledger, window_rows=window_rows))) == sorted(map(str, [gap, *runs]))


def test_rows_without_partition_or_offset_are_named_and_stop_nobody(ledger: AuditedLedger) -> None:
    schema = pa.schema([pa.field(field.name, field.type) for field in LEDGER_ARROW])
    known = batch_of(*(ledger_row_at(7, at) for at in range(3))).to_pylist()
    rows = [{**known[0], "partition": None}, {**known[1], "offset": None}, {**known[2], "partition": None}]
    file = Path(ledger.path, "a.parquet")
    parquet.write_table(pa.Table.from_pylist(rows, schema), file)
    add = {"path": file.name, "size": file.stat().st_size, "partitionValues": {}, "modificationTime": 0}
    write_commit(ledger, {"add": {**add, "dataChange": True}})
    for window_rows in (4, 4_000_000):
        report = checked(ledger, window_rows=window_rows)
        assert {f.text for f in report.findings} == {"there are rows without partition or offset"}
        assert report.rows == 20


def test_a_column_that_readers_take_from_the_log_is_found(ledger: AuditedLedger) -> None:
    metadata, adds = actions_of(ledger, "metaData")[-1], actions_of(ledger, "add")
    metadata["partitionColumns"] = ["verdict"]
    forged = [{"add": {**add, "partitionValues": {"verdict": "rejected"}}} for add in adds]
    write_commit(ledger, {"metaData": metadata}, *forged)
    shown = dataset_of(DeltaTable(ledger.path)).to_table(columns=["verdict"])
    assert set(shown["verdict"].to_pylist()) == {"rejected"}, "what readers see"
    assert ("hidden_rows", None, None, None) in wrong(ledger)
    assert "takes verdict from its log" in checked(ledger).findings[0].text


@pytest.mark.parametrize("change", ["another type", "one more", "one less"])
def test_a_table_with_other_columns_than_ours_is_found(ledger: AuditedLedger, change: str) -> None:
    metadata = actions_of(ledger, "metaData")[-1]
    schema = json.loads(metadata["schemaString"])
    if change == "another type":
        next(field for field in schema["fields"] if field["name"] == "seq")["type"] = "integer"
    elif change == "one more":
        schema["fields"].append({"name": "seq2", "type": "long", "nullable": True, "metadata": {}})
    else:
        schema["fields"] = [field for field in schema["fields"] if field["name"] != "seq"]
    write_commit(ledger, {"metaData": {**metadata, "schemaString": json.dumps(schema)}})
    assert wrong(ledger) == [("hidden_rows", None, None, None)]
    assert "others: seq" in checked(ledger).findings[0].text


LIES: list[dict[str, Any]] = [
    {"minValues": {"offset": 10**9}, "maxValues": {"offset": 10**9}},
    {"maxValues": {"offset": 10**9}},
    {"minValues": {"partition": 1}},
    {"minValues": {"verdict": "rejected"}, "maxValues": {"verdict": "rejected"}},
    {"maxValues": {"logged_at": "2026-01-01T00:00:00.000Z"}},
    {"nullCount": {"offset": 1}},
    {"numRecords": 5},
]


@pytest.mark.parametrize("window_rows", [5, 4_000_000])
@pytest.mark.parametrize("lie", LIES, ids=json.dumps)
def test_what_the_log_says_of_a_file_is_compared_with_its_rows(
    ledger: AuditedLedger, lie: dict[str, Any], window_rows: int
) -> None:
    said_anew(ledger)
    assert wrong(ledger, window_rows=window_rows) == []
    said_anew(ledger, **lie)
    report = checked(ledger, window_rows=window_rows)
    assert [(f.what, "the log says of it" in f.text) for f in report.findings] == [("hidden_rows", True)]
    assert actions_of(ledger, "add")[0]["path"] in report.findings[0].text


def test_a_file_of_which_the_log_says_nothing_is_read_and_no_finding(ledger: AuditedLedger) -> None:
    add = actions_of(ledger, "add")[0]
    del add["stats"]
    write_commit(ledger, {"add": add})
    for window_rows in (5, 4_000_000):
        assert wrong(ledger, window_rows=window_rows) == []
    tidy_ledger(ledger.settings, 0)
    assert wrong(ledger) == []


@pytest.mark.parametrize("window_rows", [5, 4_000_000])
def test_what_a_footer_says_of_its_rows_is_compared_with_them(ledger: AuditedLedger, window_rows: int) -> None:
    file = Path(ledger.path, actions_of(ledger, "add")[1]["path"])
    honest = file.read_bytes()
    at = honest.rindex((8).to_bytes(8, "little"), 0, len(honest))
    footer = len(honest) - 8 - int.from_bytes(honest[-8:-4], "little")
    assert at > footer, "the greatest offset stands in the footer alone"
    data = honest[:footer] + honest[footer:].replace((8).to_bytes(8, "little"), (5).to_bytes(8, "little"))
    file.write_bytes(data)
    hidden = dataset_of(DeltaTable(ledger.path))
    report = checked(ledger, window_rows=window_rows)
    assert [(f.what, "its footer says" in f.text) for f in report.findings] == [("hidden_rows", True)]
    assert hidden.count_rows() == 17


def test_a_footer_that_contradicts_itself_keeps_its_rows_from_no_audit(ledger: AuditedLedger) -> None:
    file = Path(ledger.path, actions_of(ledger, "add")[1]["path"])
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    swapped = {(4).to_bytes(8, "little"): b"x" * 8, (8).to_bytes(8, "little"): (4).to_bytes(8, "little")}
    said = data[footer:]
    for one, other in swapped.items():
        said = said.replace(one, other)
    file.write_bytes(data[:footer] + said.replace(b"x" * 8, (8).to_bytes(8, "little")))
    assert ("hidden_rows", None, None, None) in wrong(ledger, window_rows=5)
    assert ("hidden_rows", None, None, None) in wrong(ledger)


def test_cut_texts_and_times_are_no_lies_and_numbers_are_never_cut() -> None:
    seen = Seen(2, {"type": Bounds(0, b"job.event", b"job.picked"), "sent_at": Bounds(1, 1_000_500, 2_000_999)})
    seen.bounds["seq"] = Bounds(0, 3, 9)
    cut = {"type": Bounds(0, b"job", b"jp"), "sent_at": Bounds(None, 1_000_000, 2_000_000)}
    assert contradiction(Said(2, cut, 999), seen) is None
    assert contradiction(Said(None, {"seq": Bounds(None, None, None)}), seen) is None
    assert contradiction(Said(2, cut), seen) == "another least or greatest sent_at"
    for bounds in (Bounds(0, 2, 9), Bounds(0, 3, 10), Bounds(0, b"3", 9)):
        assert contradiction(Said(2, {"seq": bounds}), seen) == "another least or greatest seq"
    assert contradiction(Said(2, {"type": Bounds(0, b"job.f", b"k")}), seen) is not None


def test_a_batch_that_was_never_settled_is_named_between_entries_and_within_one(tmp_path: Path) -> None:
    ledger = AuditedLedger(tmp_path)
    ledger.commit_offsets({0: (0, 4), 1: (2, 4)}, leaves_out=True)
    ledger.commit([ledger_row_at(0, at) for at in (4, 5, 7)])
    ledger.keep()
    assert wrong(ledger) == [("never_settled", 1, 0, 1), ("never_settled", 0, 4, 7)]
    assert "1 never settled among partition 0, offsets 4 to 7" in checked(ledger).findings[1].text


def test_rows_that_are_older_than_the_chain_are_as_many_as_they_were(tmp_path: Path) -> None:
    ledger = AuditedLedger(tmp_path)
    add_file(ledger, batch_of(*(ledger_row_at(0, at) for at in range(5))), "old.parquet")
    ledger.restart()
    ledger.commit_offsets({0: (5, 7)})
    ledger.keep()
    assert wrong(ledger) == []
    add_file(ledger, batch_of(ledger_row_at(0, 2)), "new.parquet")
    assert wrong(ledger) == [("row_added", None, None, None)]
    DeltaTable(ledger.path).delete("offset IN (1, 2)")
    assert wrong(ledger) == [("row_missing", None, None, None)]


def test_an_entry_that_counts_otherwise_than_its_rows_is_found(ledger: AuditedLedger) -> None:
    last = last_in_file(ledger.trail.path)
    assert last is not None
    path = ledger.trail.path
    before = b"".join(path.read_bytes().splitlines(keepends=True)[:-1])
    for change in ({"rows": 18}, {"ends": {**last.entry.ends, 0: 20}}):
        entry = replace(last.entry, **change)
        path.write_bytes(before + ChainLine(last.version, entry.value(), entry).text())
        assert ("entry_changed", None, None, None) in wrong(ledger, without_anchors=True)
        text = next(f.text for f in checked(ledger, without_anchors=True).findings if f.what == "entry_changed")
        assert "contradicts itself" in text


def test_anchors_that_lie_beside_the_ledger_are_told(
    ledger: AuditedLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in settings_environment(ledger.settings).items():
        monkeypatch.setenv(name, value)
    assert checked(ledger).anchors_beside == anchors_file(ledger.settings)
    assert checked(ledger, without_anchors=True).anchors_beside is None
    assert main(["audit", "verify"]) == 0
    assert "they lie beside the ledger" in capsys.readouterr().out
    other = tmp_path.parent / f"{tmp_path.name}-anchors"
    other.mkdir()
    (other / "anchors.ndjson").write_bytes(anchors_file(ledger.settings).read_bytes())
    assert main(["audit", "verify", "--anchors", str(other)]) == 0
    assert "beside" not in capsys.readouterr().out


HUGE = (2**63 - 1, 2**63, 2**64, 10**30)


@pytest.mark.parametrize("number", HUGE)
def test_no_number_in_chain_or_anchors_stops_the_auditor(
    ledger: AuditedLedger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    for name, value in settings_environment(ledger.settings).items():
        monkeypatch.setenv(name, value)
    (anchor,) = [json.loads(line) for line in anchors_file(ledger.settings).read_text().splitlines()]
    with anchors_file(ledger.settings).open("a") as file:
        for name in ("rows", "length", "time_us"):
            changed = {**anchor, "statement": {**anchor["statement"], name: number}}
            file.write(json.dumps(changed) + "\n")
        file.write(json.dumps({**anchor, "statement": {**anchor["statement"], "ends": {number: 1}}}) + "\n")
    assert main(["audit", "verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["anchors_unreadable"] == 4
    lines = ledger.trail.path.read_text().splitlines()
    for change in ({"rows": number}, {"ends": {"0": number}}, {"batch": number}):
        document = json.loads(lines[-1])
        document["entry"] |= change
        ledger.trail.path.write_text("\n".join([*lines[:-1], json.dumps(document)]) + "\n")
        assert main(["audit", "verify", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["findings"][0]["what"] == "chain_broken"


def test_an_entry_that_claims_more_rows_than_there_is_memory_is_refused(ledger: AuditedLedger) -> None:
    last = list(lines_in_file(ledger.trail.path))[-1]
    assert last is not None
    root = replace(last.entry.partitions[0], partition=5, first=0, last=2**40, rows=2**40 + 1)
    entry = replace(next_entry(last.entry, "q", 9, ["[]"]), partitions=(root,))
    metadata = json.dumps({"query": "q", "batch": 9, "audit": commit_metadata(entry)})
    write_commit(ledger, {"commitInfo": {"timestamp": 0, "operation": "WRITE", "userMetadata": metadata}})
    assert {what for what, *_ in wrong(ledger)} == {"entry_changed"}
