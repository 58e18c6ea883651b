"""`trunkline upgrade` on data directories of earlier commits, with records that they did not settle."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from deltalake import DeltaTable

from connectors.programs.local_stack import free_port
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import LOOPBACK, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.stack]

# Fold version 11, the oldest that is brought over: agents over MQTT confirm nothing, messages have no subject.
COMMITS = ("5902560",)
WITHIN_S = 1500
LEFT = 5


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(PROJECT_ROOT), *arguments], capture_output=True, text=True)


@pytest.fixture(params=COMMITS)
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A checkout of an earlier commit, which sets itself up."""
    folder = tmp_path / "earlier"
    added = git("worktree", "add", "--detach", str(folder), request.param)
    assert added.returncode == 0, added.stderr
    yield folder
    git("worktree", "remove", "--force", str(folder))


class Versions:
    """The programs of two versions on one data directory."""

    def __init__(self, earlier: Path, data: Path) -> None:
        self._earlier = earlier
        self.port = free_port()
        self._places = {
            "DATA_DIR": str(data),
            "KAFKA__BOOTSTRAP_SERVERS": f"{LOOPBACK}:{free_port()}",
            "MQTT__PORT": str(free_port()),
            "GATEWAY__PORT": str(self.port),
            "AGENT_MCP__PORT": str(free_port()),
            "DASHBOARD__PORT": str(free_port()),
            "AUDIT__CHAIN_DIR": str(data.with_name("chain")),
        }

    @property
    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRUNKLINE")}
        places = {f"TRUNKLINE__{name}": value for name, value in self._places.items()}
        return {**kept, "TRUNKLINE_CONF": os.devnull, **places}

    def call(self, *arguments: str, old: bool = False, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run `trunkline` of this version, or of the earlier one."""
        program = (self._earlier if old else PROJECT_ROOT) / "trunkline"
        done = subprocess.run(
            [str(program), *arguments],
            env=self._environment,
            cwd=program.parent,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert done.returncode == code, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done

    def json(self, *arguments: str, old: bool = False) -> Any:
        return json.loads(self.call(*arguments, "--json", old=old).stdout.splitlines()[-1])

    def streams_in_ledger(self) -> set[str]:
        """The ids of all streams in the ledger."""
        path = f"{self._places['DATA_DIR']}/tables/ledger"
        if not DeltaTable.is_deltatable(path):
            return set()
        return set(DeltaTable(path).to_pyarrow_table(columns=["stream_id"])["stream_id"].to_pylist())

    def register(self) -> str:
        """Register a job over HTTP."""
        token = Path(self._places["DATA_DIR"], "keys", "operator.token").read_text().strip()
        answer = httpx.post(
            f"http://{LOOPBACK}:{self.port}/api/hub/jobs",
            json={"description": "before the upgrade"},
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
            trust_env=False,
        )
        assert answer.status_code in (200, 201), answer.text
        return str(answer.json()["job_id"])


@pytest.mark.requirement("ST-07")
@pytest.mark.timeout(3000)
def test_a_directory_of_an_earlier_commit_is_brought_over_with_what_it_had_not_settled(
    earlier: Path, tmp_path: Path
) -> None:
    both = Versions(earlier, tmp_path / "data")
    try:
        both.call("up", "--only", "kafka,mosquitto,bridge,gateway,streams", old=True)
        settled = both.register()
        wait_until(lambda: settled in both.streams_in_ledger(), 120, "the job in the ledger")
        both.call("down", old=True)
        both.call("up", "--only", "kafka,gateway", old=True)
        unsettled = [both.register() for _ in range(LEFT)]
        both.call("down", old=True)
        refused = both.call("up", code=4)
        assert "./trunkline upgrade" in refused.stderr
        planned = both.json("upgrade", "--dry-run")
        assert (planned["left"], planned["dry_run"]) == (None, True)
        both.call("up", "--only", "kafka")
        planned = both.json("upgrade", "--dry-run")
        assert planned["left"] >= LEFT
        done = both.json("upgrade")
        assert done["left"] == planned["left"]
        assert both.json("upgrade")["left"] == 0, "it can be called again"
        both.call("up", "--only", "kafka,mosquitto,bridge,gateway,streams")
        later = both.register()
        known = {job["job_id"] for job in both.json("jobs", "list")["jobs"]}
        assert {settled, *unsettled, later} <= known
        wait_until(lambda: not both.json("fold", "status")["left"]["ledger"], 120, "the ledger's end")
        both.call("audit", "verify")
    finally:
        both.call("down", old=True)
        both.call("down")
