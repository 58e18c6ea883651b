"""A data directory with a launcher of agents, and what tests of it look at."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.hub.launcher import local_processes
from connectors.hub.launcher.launch_spec import Launcher, LaunchRule, LaunchSpec, Started
from connectors.hub.launcher.local_processes import LocalProcessLauncher, stop_all
from schemas.settings.settings import Settings
from tests.broker_processes import wait_until

CANARY = "canary-7f3e-token"
TOKEN = "TRUNKLINE_AGENT_TOKEN"
HUB = "TRUNKLINE_HUB_URL"
IDLE = "print('here', flush=True); import time; time.sleep(600)"


class Place:
    """A data directory of its own, with a launcher whose rules can be added to."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data_dir=folder)
        self.rules: dict[str, LaunchRule] = {}
        self.launcher: Launcher = LocalProcessLauncher(self.settings, self.rules)

    def spec(self, command: list[str], **fields: Any) -> LaunchSpec:
        """Return the launch specification for this command, and add a rule for it."""
        rule = {"command": command, **fields.pop("rule", {})}
        known = {"container": "c1", "task_id": "t1", "agent_name": "ann", "image": "images/ann"}
        told = {"description": "some work", "environment": {TOKEN: CANARY, HUB: "http://127.0.0.1:9"}}
        spec = LaunchSpec(**{**known, **told, **fields})
        self.rules[spec.image] = LaunchRule.model_validate(rule)
        return spec

    def start(self, code: str, **fields: Any) -> Started:
        """Start an agent that runs this program."""
        return self.launcher.start(self.spec(["{python}", "-c", code], **fields))

    def output(self, container: str = "c1") -> str:
        """Return the agent's output so far."""
        return (self.settings.data_path / "agents" / container / "output.log").read_text()

    def said(self, container: str = "c1") -> dict[str, Any]:
        """Wait for the output of an agent that prints one JSON object, and return the object."""
        wait_until(lambda: self.output(container).endswith("\n"), what="the agent's words")
        return dict(json.loads(self.output(container).splitlines()[-1]))

    def noted(self) -> list[str]:
        """The containers that are noted as running."""
        return sorted(path.stem for path in (self.settings.data_path / "run" / "agents").glob("*"))


@pytest.fixture(name="place")
def own_place(tmp_path: Path) -> Iterator[Place]:
    """A place of which nothing runs on."""
    found = Place(tmp_path / "a data dir")
    yield found
    stop_all(found.settings, 0.0)
    assert running(str(tmp_path)) == []


@pytest.fixture(name="patient")
def patient_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the launcher notice an early end of an agent even on a busy machine."""
    monkeypatch.setattr(local_processes, "EARLY_END_S", 20.0)


def running(text: str) -> list[int]:
    """The processes with this text in their environment, their arguments or as their folder."""
    found = []
    for process in psutil.process_iter():
        try:
            seen = [*process.environ().values(), *process.cmdline(), process.cwd()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(text in value for value in seen):
            found.append(process.pid)
    return found


def pid_of(handle: str) -> int:
    """The process of a handle."""
    return int(handle.split("/")[1])
