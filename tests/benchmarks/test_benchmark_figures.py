"""The figures of the long benchmarks: what is compared with what, and that too little is said to be so."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from connectors.programs.local_stack import child_process
from schemas.settings.settings import Settings
from schemas.tables.ledger import LEDGER
from tests.benchmarks import freshness
from tests.benchmarks.bench_report import Bench, is_as_stated, not_held, report
from tests.benchmarks.endurance import compared
from tests.benchmarks.event_load import events, jobs_for
from tests.benchmarks.growth import batch_ratio
from tests.benchmarks.process_times import CoreMeter
from tests.benchmarks.stack_figures import MemoryLooks, Process, file_figures, files_ratio
from tests.benchmarks.topics import arrivals
from tests.benchmarks.wake import AT_MOST, figures
from tests.benchmarks.wake_load import Log

JVM, DRIVER = Process("streams", "java", 10), Process("streams", "python3.11", 11)


def looks(end_s: int, driver_mb: float, driver: Process = DRIVER) -> MemoryLooks:
    """A look each 10 s; in the end the driver, or another process in its place, holds so much."""
    found = MemoryLooks(600)
    for at_s in range(0, end_s + 1, 10):
        late = at_s > end_s - 120
        found.add(at_s, {JVM: 2000.0, driver if late else DRIVER: driver_mb if late else 100.0})
    return found


def test_a_driver_that_grows_does_not_hide_behind_its_jvm() -> None:
    found = looks(1500, 250.0).figures()
    assert found["memory_ratio"] == {"streams/java": 1.0, "streams/python3.11": 2.5}
    assert found["memory_worst_ratio"] == 2.5
    assert found["errors"] == []


def test_a_process_that_is_replaced_by_a_larger_one_is_compared_with_it() -> None:
    found = looks(1500, 150.0, Process("streams", "python3.11", 99)).figures()
    assert found["memory_ratio"]["streams/python3.11"] == 1.5


def test_one_of_two_that_grows_while_the_other_shrinks_is_seen() -> None:
    found, other = MemoryLooks(600), Process("kafka", "java", 1)
    more = Process("kafka", "java", 2)
    for at_s in range(0, 1501, 10):
        late = at_s > 1300
        found.add(at_s, {other: 50.0 if late else 100.0, more: 150.0 if late else 100.0})
    assert found.figures()["memory_ratio"] == {"kafka/java": 1.5}


def test_memory_that_cannot_be_compared_is_an_error_and_not_an_empty_figure() -> None:
    for end_s in (0, 590, 640):
        found = looks(end_s, 100.0).figures()
        assert found["memory_worst_ratio"] is None
        assert "cannot be compared" in found["errors"][0]
    assert MemoryLooks(600).figures()["errors"]


def test_too_few_micro_batches_are_an_error_beside_the_other_figures() -> None:
    assert compared({1: 100.0}) == {"errors": ["1 micro-batches are too few"]}
    assert compared(dict.fromkeys(range(500), 100.0))["median_ratio"] == 1.0


def test_live_files_are_the_most_of_the_first_and_of_the_last_third() -> None:
    counts = [3, 9, 4, 2, 50, 2, 5, 8, 1]
    assert file_figures([{"ledger": count} for count in counts]) == {
        "ledger": {"most_in_first_third": 9, "most_in_last_third": 8, "last": 1}
    }
    assert file_figures([]) == {}


def test_files_that_grow_in_one_table_are_seen_beside_others_and_few_ones_do_not_count() -> None:
    steady, grown, few = (
        {"most_in_first_third": first, "most_in_last_third": last, "last": last}
        for first, last in ((600, 640), (200, 500), (20, 90))
    )
    assert files_ratio({"ledger": steady, "mailbox": few}) == round(640 / 600, 3)
    assert files_ratio({"ledger": steady, "registry_jobs": grown}) == 2.5
    assert files_ratio({}) is None
    assert not_held({"files_worst_ratio": None}, {"files_worst_ratio": 1.5})


def test_a_limit_that_is_passed_or_has_no_figure_is_named_and_one_that_is_reached_is_held() -> None:
    figures = {"p50": 0.5, "p95": 1.0, "ratio": 0.4, "memory": None}
    assert not_held(figures, {"p50": 0.5}, {"ratio": 0.4}) == []
    assert not_held(figures, {"p95": 0.9, "memory": 1.2}, {"ratio": 0.45, "absent": 1}) == [
        "p95 is 1.0, at most 0.9",
        "memory is None, at most 1.2",
        "ratio is 0.4, at least 0.45",
        "absent is None, at least 1",
    ]


def test_a_limit_is_for_the_run_that_is_asked_for_by_nothing_but_json() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    assert is_as_stated(parser, parser.parse_args(["--json", "--rate", "500"]))
    assert not is_as_stated(parser, parser.parse_args(["--rate", "400"]))


@pytest.mark.parametrize(
    ("result", "code"),
    [({"a": 1}, 0), ({"not_held": [], "errors": []}, 0), ({"not_held": ["x"]}, 1), ({"errors": ["x"]}, 1)],
)
def test_a_limit_that_is_not_held_and_an_error_are_told_by_the_exit_code(
    result: dict[str, Any], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(result, as_json=True) == code
    assert capsys.readouterr().out == json.dumps(result) + "\n"
    assert report(result, as_json=False) == code
    assert json.loads(capsys.readouterr().out) == result


def test_wake_has_medians_of_its_rounds_but_the_sums_of_what_must_not_happen() -> None:
    same = {"p50_ms": 8, "idle_cores": 0.02, "failed": 0, "us_per_op": {"gateway": 700.4, "load": 90}}
    ours = [
        same | {"p99_ms": p99, "empty_answers": empty, "missed": missed}
        for p99, empty, missed in ((20, 0, 1), (40, 2, 0))
    ]
    theirs = [same | {"p99_ms": 20, "empty_answers": 0, "missed": 0}] * 2
    found = figures(ours, theirs)
    assert found["us_per_op"] == found["peer_us_per_op"] == {"gateway": 700.4, "load": 90}
    assert (found["in_hand_p99_ms"], found["peer_p99_ms"], found["ratio_p99"]) == (30, 20, 1.5)
    assert not_held(found, AT_MOST) == ["empty_answers is 2, at most 0", "missed is 1, at most 0"]


def test_a_message_is_missed_if_it_was_acknowledged_and_nobody_has_it() -> None:
    log = Log(sent={1: 0.0, 2: 0.0, 3: 0.0}, acknowledged={1, 2})
    log.received([1, 3])
    first = log.in_hand[1]
    log.received([1])
    assert (log.missed(), log.in_hand[1]) == (1, first)


@pytest.mark.requirement("ST-62")
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--json"], ["ratio_p50 is 2, at most 1.6"]),
        (["--json", "--before", "x"], ["ratio_p50 is 2, at most 1.6", "ratio_cores is 0.7, at most 0.65"]),
        (["--json", "--rate", "100"], None),
    ],
)
def test_a_limit_that_needs_an_option_counts_with_it_and_the_others_count_either_way(
    arguments: list[str], wanted: list[str] | None, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    bench = Bench("x", None, {"ratio_p50": 1.6, "ratio_cores": 0.65}, needs={"ratio_cores": "before"})
    bench.add_argument("--rate", type=int, default=500)
    bench.add_argument("--before", default=None)
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    code = bench.run(lambda args, work: {"ratio_p50": 2, "ratio_cores": 0.7 if args.before else None})
    assert json.loads(capsys.readouterr().out).get("not_held") == wanted
    assert code == (1 if wanted else 0)


@pytest.mark.requirement("ST-62")
def test_freshness_compares_the_medians_of_the_rounds_with_those_of_the_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path)
    late = {str(settings.table_path(LEDGER)): 0.4}

    def moments(at: Settings) -> tuple[dict[str, float], dict[str, Any], set[str]]:
        by_s = late.get(str(at.table_path(LEDGER)), 0.2)
        return {f"e{n}": n + by_s for n in range(40)}, {}, set()

    def turn(first: int, cores: float) -> freshness.Turn:
        # Only the second half counts.
        sent = {f"e{n}": float(n) for n in range(first, first + 10)}
        return freshness.Turn(sent, {}, (first + 5.0, first + 10.0), {"gateway": cores, "load": 0.1})

    monkeypatch.setattr(freshness, "ledger_moments", moments)
    ours, controls = [turn(0, 0.3), turn(20, 0.5)], [turn(10, 0.2), turn(30, 0.2)]
    found = freshness.compared_to_control(settings, ours, controls)
    assert (found["control_p50_s"], found["control_p95_s"]) == (0.2, 0.2)
    assert (found["ratio_p50"], found["ratio_p95"]) == (2.0, 2.0)
    assert found["cores"] == {"gateway": 0.4, "load": 0.1}
    assert (found["cores_total"], found["control_cores_total"]) == (0.5, 0.3)


@pytest.mark.long
@pytest.mark.requirement("ST-62")
def test_the_cores_of_a_stack_are_those_of_its_processes_and_of_the_load(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    mark = child_process.mark_of(settings.data_path, "gateway")
    busy = [sys.executable, "-S", "-c", "while True: pass"]
    process = child_process.start_child(busy, cwd=tmp_path, environment={}, mark=mark, log=tmp_path / "log")
    try:
        meter = CoreMeter(settings, 0.2, 1.0)
        meter.start()
        meter.join()
    finally:
        child_process.end_child(process, mark)
    assert set(meter.cores) == {"gateway", "load"}
    assert 0.02 < meter.cores["gateway"] < 1.2
    assert meter.cores["load"] < meter.cores["gateway"]


@pytest.mark.requirement("ST-63")
def test_a_missing_size_of_the_registry_has_no_ratio_and_a_slow_one_is_not_held() -> None:
    few, many = ({"wanted_jobs": size, "batch_median_ms": ms} for size, ms in ((1_000, 200), (1_000_000, 250)))
    assert batch_ratio([few]) == {}
    assert batch_ratio([few, many]) == {
        "batch_ratio": 1.25,
        "held": [],
        "not_held": ["batch_ratio is 1.25, at most 1.2"],
    }
    assert batch_ratio([few, {**many, "batch_median_ms": None}])["not_held"]


@pytest.mark.long
@pytest.mark.requirement("ST-63")
def test_jobs_of_a_thousand_events_have_them_and_half_of_the_jobs_end() -> None:
    found = list(events(20_000, per_job=1000))
    by_job = Counter(record.stream for record in found)
    assert len(by_job) <= jobs_for(20_000, 1000)
    assert sum(b'"completed"' in record.value for record in found) >= len(by_job) // 3
    assert 900 < max(by_job.values()) < 1200


@pytest.mark.requirement("DL-24")
def test_a_copy_that_is_missing_or_double_is_an_error_of_the_bench_of_topics() -> None:
    def row(message_id: str, second: int) -> dict[str, Any]:
        return {"broadcast_id": message_id, "posted_at": f"2026-01-31T12:00:{second:02d}.000Z"}

    published = {"p1": 0.0, "p2": 1.0}
    good = {"ann": [row("p1", 1), row("p2", 2)], "bo": [row("p1", 3), row("p2", 2)]}
    last, errors = arrivals(published, good)
    assert (last["p1"] - last["p2"], errors) == (1.0, [])
    _, errors = arrivals(published, {**good, "bo": [row("p1", 3), row("p1", 4)]})
    assert errors == ["bo: 1 missing, 1 double"]
