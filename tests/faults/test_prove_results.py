"""The results of `./trunkline prove`: what a later run takes over or runs again, and what the sum says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.prove.comparison import DUPLICATE, LOST, MISBEHAVED
from tests.faults.prove.prove_faults import MEETS_ALL, exit_code
from tests.faults.prove.results import Results, programs_hash, summary
from tests.faults.prove.schedule import ALL_FAULTS
from tests.faults.prove.seed_run import LIMIT_S, SeedResult, slowness

THESE = "these"


def result(seed: int, **more: Any) -> dict[str, Any]:
    """A line of results."""
    faults = {"kill:kafka": 1}
    return {"seed": seed, "acknowledged": 10, "findings": [], "faults": faults, "is_judged": True, **more}


def test_results_go_on_where_they_ended_also_behind_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = Results(path, THESE)
    results.add(result(1))
    with path.open("a") as file:
        file.write('{"seed": 3, "ackno')
    again = Results(path, THESE)
    assert [again.has(seed) for seed in (1, 3)] == [True, False]
    again.add(result(3))
    found = summary(Results(path, THESE).of(range(1, 5)))
    assert (found["seeds"], found["acknowledged"], found[LOST], found["unjudged"]) == (2, 20, 0, 0)
    assert found["faults"] == {"kill:kafka": 2}
    assert json.loads(json.dumps(found)) == found


def test_a_seed_with_a_finding_is_run_again_and_its_last_result_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = Results(path, THESE)
    results.add(result(2, findings=[{"kind": LOST, "what": "m1"}, {"kind": MISBEHAVED, "what": "it"}]))
    found = summary(results.of([2]))
    assert (found["seeds"], found[LOST], found[DUPLICATE], found[MISBEHAVED]) == (1, 1, 0, 1)
    again = Results(path, THESE)
    assert not again.has(2)
    again.add(result(2))
    assert Results(path, THESE).has(2) and summary(again.of([2]))[LOST] == 0
    assert len(path.read_text().splitlines()) == 2


def test_a_seed_over_its_limit_is_a_finding() -> None:
    found = [SeedResult(seed) for seed in (1, 2)]
    for seed, seconds in zip(found, (LIMIT_S, LIMIT_S + 0.1), strict=True):
        seed.took(seconds)
    late = {"kind": MISBEHAVED, "what": "it took 100.1 s, at most 100"}
    assert [seed.findings for seed in found] == [[], [late]]
    assert [seed.seconds for seed in found] == [LIMIT_S, LIMIT_S + 0.1]
    assert summary([seed.as_json() for seed in found])[MISBEHAVED] == 1


@pytest.mark.requirement("ST-65")
def test_a_run_whose_doors_start_slowly_has_more_time_with_a_bound() -> None:
    assert [slowness(start_s) for start_s in (0.0, 15.0, 30.0, 60.0, 600.0)] == [1, 1, 2, 4, 4]


def test_a_result_of_other_programs_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path, THESE).add(result(1))
    path.write_text(path.read_text() + json.dumps(result(2)) + "\n")
    other = Results(path, "others")
    assert not other.has(1) and other.of([1, 2]) == []
    assert not Results(path, THESE).has(2)


def test_a_seed_that_tells_nothing_of_what_was_lost_is_counted_as_unjudged(tmp_path: Path) -> None:
    lines = [result(1), result(2, is_judged=False, findings=[{"kind": MISBEHAVED, "what": "not at rest"}])]
    found = summary(lines)
    assert (found["seeds"], found[LOST], found["unjudged"]) == (2, 0, 1)


def test_a_hundred_seeds_that_never_met_a_fault_are_no_proof() -> None:
    met = dict.fromkeys(ALL_FAULTS, 1)
    lines = [result(seed, faults=met) for seed in range(MEETS_ALL)]
    assert summary(lines)["not_injected"] == [] and exit_code(summary(lines)) == 0
    point, *others = ALL_FAULTS
    lines = [result(seed, faults=dict.fromkeys(others, 1)) for seed in range(MEETS_ALL)]
    found = summary(lines)
    assert found["not_injected"] == [point] and exit_code(found) == 1
    assert exit_code(summary(lines[1:])) == 0
    one_more = result(MEETS_ALL, faults=met, findings=[{"kind": LOST, "what": "m1"}])
    assert exit_code(summary([*lines, one_more])) == 1


def test_a_change_of_any_program_makes_them_others_and_what_python_compiles_does_not(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    program = tmp_path / "jobs" / "fold.py"
    program.write_text("one")
    first = programs_hash(tmp_path)
    (tmp_path / "jobs" / "fold.pyc").write_text("compiled")
    (tmp_path / "README.md").write_text("words")
    assert programs_hash(tmp_path) == first
    program.write_text("other")
    assert programs_hash(tmp_path) != first
    assert programs_hash() == programs_hash()
