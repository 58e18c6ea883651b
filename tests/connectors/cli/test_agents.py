"""`trunkline agents`, and what cannot be started, against a real gateway with definitions of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import wait_until
from tests.connectors.cli.conftest import CommandLine
from trunkline_agent.hub.plans import Answer, Request
from trunkline_agent.hub.sync_connection import SyncConnection

HOSTILE = "red bidi \u202e zero\u200b"


@pytest.fixture
def hub_settings(hub_settings: Settings, tmp_path: Path) -> Settings:
    """Settings with a folder of definitions: one that runs, one that nothing runs, one with a fault."""
    folder = tmp_path / "agents"
    folder.mkdir()
    shutil.copy(PROJECT_ROOT / "conf" / "agents" / "echo.json", folder)
    nobody = {"name": "nobody", "image": "none/such", "description": HOSTILE, "capabilities": []}
    (folder / "nobody.json").write_text(json.dumps(nobody))
    (folder / "bad.json").write_text('{"name": "bad", "image": "x", "colour": "red"}')
    gateway = hub_settings.gateway.model_copy(update={"agents_dir": folder})
    return hub_settings.model_copy(update={"gateway": gateway})


@pytest.fixture
def defined(hub: GatewayClient) -> None:
    """The definitions are taken up."""
    wait_until(lambda: len(hub.get(path_of("agents"))["agents"]) == 2, what="the agents")


@pytest.mark.requirement("HH-01")
@pytest.mark.requirement("CM-06")
def test_agents_are_listed_and_shown_and_files_with_faults_are_a_note_beside_them(
    defined: None, trunkline: CommandLine
) -> None:
    listed = trunkline.run("agents", "list")
    assert listed.returncode == 0
    assert [line.split()[:3] for line in listed.stdout.splitlines()[1:]] == [
        ["echo", "defined", "trunkline/echo"],
        ["nobody", "defined", "none/such"],
    ]
    assert "\\u202e" in listed.stdout
    assert "\u202e" not in listed.stdout
    (note,) = listed.stderr.splitlines()
    assert note.startswith("defines no agent: bad.json: ")
    found = trunkline.call("agents", "list", "--json")
    assert found.stderr == ""
    assert found.stdout.isascii()
    told = json.loads(found.stdout)
    assert ([a["name"] for a in told["agents"]], list(told["faults"])) == (["echo", "nobody"], ["bad.json"])
    shown = trunkline.call("agents", "show", "echo").stdout
    assert "capabilities  answer\n" in shown
    assert "hardened      no\n" in shown
    one = json.loads(trunkline.call("agents", "show", "echo", "--json").stdout)
    assert (one["name"], one["capabilities"], one["hardened"]) == ("echo", ["answer"], False)
    assert trunkline.call("agents", "show", "stranger").returncode == 3
    assert trunkline.call("agents", "show", "bad").returncode == 3
    # A name that would lead elsewhere is no name.
    assert trunkline.call("agents", "show", "..").returncode == 2


@pytest.mark.requirement("HH-03")
def test_an_agent_that_does_not_start_is_exit_4_and_its_task_has_failed(
    defined: None, trunkline: CommandLine, agents_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _count_requests(monkeypatch)
    done = trunkline.call("tasks", "submit", "nobody", "anything", "--request-id", "n-1")
    assert (done.returncode, done.stdout) == (4, "")
    assert "no command for the image none/such" in done.stderr
    # It is an answer, and not asked for again as when the gateway is away.
    assert asked == ["POST"]
    again = trunkline.call("tasks", "submit", "nobody", "anything", "--request-id", "n-1", "--wait", "30")
    assert again.returncode == 4
    failed = json.loads(trunkline.call("tasks", "list", "--status", "failed", "--json").stdout)
    assert [(t["agent_name"], t["total"]) for t in [failed["tasks"][0] | {"total": failed["total"]}]] == [
        ("nobody", 1)
    ]
    assert "none/such" in failed["tasks"][0]["error"]
    assert "none/such" in trunkline.call("tasks", "list").stdout


def _count_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    answered = SyncConnection.answer

    def counted(connection: SyncConnection, request: Request, until: float) -> Answer:
        asked.append(request.method)
        return answered(connection, request, until)

    monkeypatch.setattr(SyncConnection, "answer", counted)
    return asked
