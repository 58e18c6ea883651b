"""`trunkline prove`: what it prints of the results that there are, and its exit codes. Seeds: tests/faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from connectors.cli.main import main


def written(path: Path, *lines: dict[str, Any]) -> Path:
    """A file of results."""
    given = {"acknowledged": 100, "findings": [], "faults": {"kill:kafka": 1}}
    path.write_text(
        "".join(json.dumps({"seed": seed, **given, **line}) + "\n" for seed, line in enumerate(lines))
    )
    return path


def test_seeds_that_have_their_result_are_summed_up_and_not_run_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = written(tmp_path / "results.jsonl", {}, {}, {})
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


def test_a_finding_is_exit_code_1_and_a_wrong_number_is_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = written(tmp_path / "results.jsonl", {"findings": [{"kind": "lost", "what": "m1"}]})
    assert main(["prove", "--results", str(results)]) == 1
    told = capfd.readouterr().out
    assert "lost 1" in told and "injected: kill:kafka 1" in told and "not injected" in told
    assert main(["prove", "--seeds", "0"]) == 2
