"""`trunkline upgrade` where the local stack's Kafka runs alone, and the earlier version settles nothing."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.cli.stack import upgrade_command
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.connectors.cli.conftest import CommandLine
from tests.connectors.cli.test_upgrade import set_version
from tests.connectors.programs.local_stack.conftest import Cli, still_running
from tests.jobs.topic_load import append_all, registration
from tests.settled_topic import settle_topic

pytestmark = pytest.mark.stack

# Starts our Kafka, as an earlier version does, and no streams. It cannot stop anything either.
WRAPPER = """#!/bin/sh
echo "$*" >>{calls}
case $1 in up) PYTHONPATH={root} {python} -P -m connectors.cli up --only kafka >&2; exit {up_code} ;; esac
exit 7
"""


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def calls(up_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the calls of the earlier version's wrapper; its repository has that wrapper alone."""
    repository, found = tmp_path / "repository", tmp_path / "calls"
    repository.mkdir()
    git(repository, "init", "--quiet")
    names = {"calls": found, "root": PROJECT_ROOT, "python": sys.executable, "up_code": up_code}
    wrapper = repository / "trunkline"
    wrapper.write_text(WRAPPER.format(**{name: shlex.quote(str(value)) for name, value in names.items()}))
    wrapper.chmod(0o755)
    git(repository, "add", "trunkline")
    git(repository, "commit", "--quiet", "--message", "the earlier version")
    monkeypatch.setattr(upgrade_command, "PROJECT_ROOT", repository)
    monkeypatch.setattr(upgrade_command, "_STUCK_S", 4.0)
    monkeypatch.setattr(
        upgrade_command, "LAST_COMMITS", {FOLD_VERSION - 1: git(repository, "rev-parse", "HEAD")}
    )
    return found


@pytest.mark.slow
@pytest.mark.requirement("ST-07")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("up_code", "reported"),
    [
        (7, "'trunkline up --only kafka,streams' of the earlier version ended with 7"),
        (0, "the earlier version has settled nothing for 4 s: look into"),
    ],
)
def test_an_upgrade_stops_the_stacks_own_kafka_and_what_an_earlier_version_has_left(
    cli: Cli, stack_settings: Settings, calls: Path, reported: str
) -> None:
    assert cli("up", "--only", "kafka").returncode == 0
    keyring = ensure_keyring(stack_settings)
    append_all(stack_settings, [registration("0badcafe", keyring)])
    settle_topic(stack_settings, keyring, lambda record: record.key != b"job/0badcafe")
    set_version(stack_settings, FOLD_VERSION - 1)
    trunkline = CommandLine(stack_settings)
    planned = trunkline.call("upgrade", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "the stack's own brokers run; they would be stopped" in planned.stdout
    assert (len(still_running(stack_settings)) > 0, calls.exists()) == (True, False)
    failed = trunkline.call("upgrade")
    assert failed.returncode == 1, failed.stderr
    assert reported in failed.stderr
    assert calls.read_text().splitlines() == ["up --only kafka,streams", "down"]
    assert still_running(stack_settings) == [], "its code is deleted"
    assert git(upgrade_command.PROJECT_ROOT, "worktree", "list").count("\n") == 0
