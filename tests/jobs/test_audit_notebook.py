"""The audit notebook runs from its first cell to its last on real tables, and shows what is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from pyspark.sql import SparkSession

from jobs import build_views
from schemas.sealing import Keyring
from schemas.settings import PROJECT_ROOT, Settings, settings_environment
from tests.jobs.conftest import Rows
from tests.jobs.topic_load import append_all, event, raw_event, registration

NOTEBOOK = PROJECT_ROOT / "notebooks" / "job_audit.ipynb"
JOB, OTHER_JOB = "ab12cd34", "ffffffff"


def outputs(notebook: nbformat.NotebookNode) -> str:
    """All text that the cells have put out."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(found)


def test_notebooks_are_committed_without_outputs() -> None:
    for path in sorted(Path(PROJECT_ROOT, "notebooks").glob("*.ipynb")):
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert cells
        assert not any(cell.outputs or cell.execution_count for cell in cells), path.name


def test_the_audit_notebook_tells_what_happened_to_a_job_and_what_was_refused(
    spark: SparkSession,
    drain: Callable[[], Rows],
    backbone_settings: Settings,
    keyring: Keyring,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forged = event(JOB, 2).value.replace(b"going on", b"forged!!")
    records = [
        registration(JOB, keyring),
        event(JOB, 1, "started", "the stars are counted"),
        raw_event(JOB, forged),
        event(JOB, 2),
        event(JOB, 2),
        event(JOB, 3, "completed"),
        event(JOB, 4),
        event(OTHER_JOB, 1, "started"),
    ]
    append_all(backbone_settings, records)
    drain()
    build_views.catch_up(backbone_settings)
    for name, value in settings_environment(backbone_settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRUNKLINE_AUDIT_JOB", JOB)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(PROJECT_ROOT))
    text = outputs(notebook)
    for expected in ("the stars are counted", "completed", "bad_signature", "after_terminal", "unknown_stream"):
        assert expected in text, expected
    assert "1 of 1 registry rows stand at the ledger's end and agree with it" in text
    plots = [
        out for cell in notebook.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})
    ]
    assert len(plots) == 2
