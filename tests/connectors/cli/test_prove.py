"""`trunkline prove`: what it prints of the results that there are, and its exit codes. Seeds: tests/faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from connectors.cli.main import main
from tests.faults.prove.prove_faults import exit_code, show
from tests.faults.prove.results import programs_hash, summary


def result(seed: int, **more: Any) -> dict[str, Any]:
    """A seed's result, found with the programs that there are."""
    given = {"acknowledged": 100, "findings": [], "faults": {"kill:kafka": 1}, "is_judged": True}
    return {"seed": seed, "programs": programs_hash(), **given, **more}


@pytest.mark.long
def test_seeds_that_have_their_result_are_summed_up_and_not_run_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(result(seed)) + "\n" for seed in range(3)))
    assert main(["prove", "--seeds", "3", "--results", str(results), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    wanted = {
        "seeds": 3,
        "acknowledged": 300,
        "lost": 0,
        "duplicate": 0,
        "divergent": 0,
        "changed_after_end": 0,
    }
    assert wanted.items() <= found.items()
    assert found["faults"] == {"kill:kafka": 3}


def test_a_finding_is_told_and_exit_code_1_and_a_wrong_number_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary([result(0, findings=[{"kind": "lost", "what": "m1"}])])
    show(found, as_json=False)
    told = capsys.readouterr().out
    assert "lost 1" in told and "injected: kill:kafka 1" in told and "not injected" in told
    assert (exit_code(found), exit_code(summary([result(0)]))) == (1, 0)
    assert main(["prove", "--seeds", "0"]) == 2
