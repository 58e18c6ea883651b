"""The example of docs/how-to/add_a_stream_kind.md in a copy of the project: one module and one list entry."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from connectors.programs.local_stack.part_plan import class_path
from schemas.settings.settings import Settings, ViewSettings
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import PROJECT_ROOT, ProgramProcess, program_environment, wait_until
from tests.jobs.topic_load import append_all
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.strict_json import canonical

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PAGE = PROJECT_ROOT / "docs" / "how-to" / "add_a_stream_kind.md"
LIMIT_S = 120
# The rows of the view as the gateway sees them.
READ_LIVE_VIEW = """
import msgspec
from connectors.hub.live.live_view import LiveView
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import load_settings
from schemas.streams.ticket.tickets import TicketRow

settings = load_settings()
view = LiveView(settings, load_keyring(settings))
view.open()
view.catch_up(60)
print(msgspec.json.encode(sorted(view.all(TicketRow), key=lambda row: row.ticket)).decode())
view.close()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of the project with the kind `ticket`."""
    root = tmp_path / "project"
    shutil.copytree(PROJECT_ROOT / "schemas", root / "schemas", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("connectors", "jobs", "conf", ".jars"):
        (root / name).symlink_to(PROJECT_ROOT / name)
    example = re.search(r'```python\n("""The tickets .*?)```', PAGE.read_text(), re.DOTALL)
    assert example is not None
    package = root / "schemas" / "streams" / "ticket"
    package.mkdir()
    (package / "tickets.py").write_text(example[1])
    kinds = root / "schemas" / "streams" / "fold.py"
    listed = kinds.read_text().replace(
        "        REFUSED_KIND,\n", "        REFUSED_KIND,\n        TICKET_KIND,\n"
    )
    imported = "from schemas.streams.thread.threads import THREAD_KIND\n"
    kinds.write_text(
        listed.replace(imported, f"{imported}from schemas.streams.ticket.tickets import TICKET_KIND\n")
    )
    return root


def change(ticket: str, state: str, note: str = "") -> OutgoingRecord:
    """Return the record that brings a ticket into a state."""
    value = canonical({"schema_version": 1, "ticket": ticket, "state": state, "note": note})
    return OutgoingRecord(
        stream=f"ticket/{ticket}",
        ce_id=content_id(b"ticket", value),
        door="http",
        principal="operator",
        type="ticket.changed",
        value=value,
    )


def stored(settings: Settings) -> list[dict[str, Any]]:
    """Return the rows of the view table, without its places in the log."""
    try:
        rows = DeltaTable(settings.table_path("registry_tickets")).to_pyarrow_table().to_pylist()
    except TableNotFoundError:
        return []
    names = ("ticket", "state", "note")
    return sorted(({name: row[name] for name in names} for row in rows), key=lambda row: str(row["ticket"]))


@pytest.mark.requirement("HO-02")
def test_a_new_kind_is_settled_by_both_runners_and_rebuilt_from_one_module_and_one_list_entry(
    project: Path, backbone_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--properties-file", str(PROJECT_ROOT / "conf" / "spark-defaults.conf"), "--master", "local[2]"]
    paths = ["--conf", f"spark.local.dir={tmp_path}", "--driver-class-path", class_path()]
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", shlex.join([*options, *paths, "pyspark-shell"]))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    settings = backbone_settings.model_copy(update={"views": ViewSettings(interval_ms=200)})

    def run(*arguments: str) -> str:
        environment = program_environment(settings)
        done = subprocess.run(
            [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout.decode()

    append_all(
        settings,
        [
            change("t1", "open", "no coffee"),
            change("t2", "solved"),  # rejected: it was never opened
            change("t1", "solved", "refilled"),
            change("t1", "open"),  # rejected by the transitions
            change("t3", "open"),
        ],
    )
    expected = [
        {"ticket": "t1", "state": "solved", "note": "refilled"},
        {"ticket": "t3", "state": "open", "note": ""},
    ]
    streams = ProgramProcess("jobs.run_streams", settings, tmp_path, "streams", root=project)
    try:
        wait_until(lambda: stored(settings) == expected, LIMIT_S, "the rows of the view table")
    finally:
        streams.stop(timeout_s=60)
    live = json.loads(run("-c", READ_LIVE_VIEW))
    assert [{name: row[name] for name in expected[0]} for row in live] == expected
    run("-m", "jobs.rebuild_views")
    assert stored(settings) == expected
    assert "registry_tickets" in run("-m", "jobs.rebuild_views", "--check")
