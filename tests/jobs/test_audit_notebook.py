"""The audit notebooks run from their first cell to their last on real tables, and show what is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from pyspark.sql import SparkSession

from jobs import build_views
from schemas.mailbox_requests import claim_record
from schemas.message import Message, posting_record
from schemas.refusal import Refusal, refusal_record
from schemas.sealing import Keyring
from schemas.settings import PROJECT_ROOT, Settings, settings_environment
from tests.jobs.conftest import Rows
from tests.jobs.topic_load import append_all, event, raw_event, registration

NOTEBOOK = PROJECT_ROOT / "notebooks" / "job_audit.ipynb"
MESSAGES = PROJECT_ROOT / "notebooks" / "message_audit.ipynb"
JOB, OTHER_JOB = "ab12cd34", "ffffffff"


def outputs(notebook: nbformat.NotebookNode) -> str:
    """All text that the cells have put out."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(found)


def executed(
    path: Path, settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> nbformat.NotebookNode:
    """A notebook, run on the tables of these settings."""
    for name, value in settings_environment(settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(PROJECT_ROOT))
    return notebook


def plots(notebook: nbformat.NotebookNode) -> int:
    """How many plots it shows."""
    found = (out for cell in notebook.cells for out in cell.get("outputs", []))
    return sum("image/png" in out.get("data", {}) for out in found)


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
    monkeypatch.setenv("TRUNKLINE_AUDIT_JOB", JOB)
    notebook = executed(NOTEBOOK, backbone_settings, tmp_path, monkeypatch)
    text = outputs(notebook)
    for expected in ("the stars are counted", "completed", "bad_signature", "after_terminal", "unknown_stream"):
        assert expected in text, expected
    assert "1 of 1 registry rows stand at the ledger's end and agree with it" in text
    assert plots(notebook) == 2


@pytest.mark.requirement("HH-08")
def test_the_message_notebook_tells_who_wrote_to_whom_how_long_it_took_and_what_was_refused(
    drain: Callable[[], Rows], backbone_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal(
        request_id="q1", reason="policy", why="the envelope has no type", principal="ann", route="r"
    )
    messages = [
        {
            "message_id": f"m{number}",
            "from": "ann",
            "to": "builder",
            "kind": "ask",
            "body": '{"text":"how far"}',
        }
        for number in range(3)
    ]
    posted = [posting_record(Message.model_validate(m), door="http", principal="ann") for m in messages]
    other = Message.model_validate({**messages[0], "body": "{}"})
    append_all(backbone_settings, [*posted, refusal_record(refusal, "http")])
    append_all(
        backbone_settings, [claim_record("default", "builder", "q1", 2, door="http", principal="builder")]
    )
    append_all(backbone_settings, [posting_record(other, door="http", principal="ann")])
    drain()
    build_views.catch_up(backbone_settings)
    notebook = executed(
        PROJECT_ROOT / "notebooks" / "message_audit.ipynb", backbone_settings, tmp_path, monkeypatch
    )
    text = outputs(notebook)
    for expected in (
        "how far",
        "claimed",
        "the envelope has no type",
        "seq_conflict",
        "2 were handed out, 1 wait",
    ):
        assert expected in text, expected
    assert "3 of 3 accepted messages are in the view, each once" in text
    assert plots(notebook) == 2
