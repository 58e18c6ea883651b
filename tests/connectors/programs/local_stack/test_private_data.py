"""The data directory is closed to other users: what earlier versions left open is found, closed, reported."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.programs.local_stack.data_files import describe_repair, find_open
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.connectors.programs.local_stack.conftest import Cli
from tests.file_modes import CAN_BECOME_ANOTHER_USER, OTHER_UID, open_to_others
from trunkline_agent.private_files import PRIVATE_UMASK, USER_UMASK_VARIABLE, user_umask

pytestmark = pytest.mark.requirement("SE-02")


def open_data(root: Path) -> Path:
    """A data directory as an earlier version left it under umask 022."""
    for folder in ("", "kafka", "kafka/log", "tables"):
        (root / folder).mkdir(exist_ok=True)
        (root / folder).chmod(0o755)
    for file in ("kafka/log/0.log", "tables/part.parquet"):
        (root / file).write_text("a message")
        (root / file).chmod(0o644)
    return root


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_was_open_is_closed_counted_and_then_not_found_again(tmp_path: Path) -> None:
    root = open_data(tmp_path / "data")
    (root / "tables" / "run.sh").touch()
    (root / "tables" / "run.sh").chmod(0o755)
    assert str(find_open(root)) == "3 files and 4 folders" and mode(root) == 0o755
    closed = find_open(root, close=True)
    assert describe_repair(root, closed) == [
        f"Other users could open 3 files and 4 folders in {root}: now only you can"
    ]
    assert open_to_others(root) == []
    assert (mode(root / "kafka"), mode(root / "tables/run.sh"), mode(root / "tables/part.parquet")) == (
        0o700,
        0o700,
        0o600,
    )
    assert describe_repair(root, find_open(root, close=True)) == []


def test_the_folder_of_a_further_node_of_kafka_is_closed_too(tmp_path: Path) -> None:
    root = open_data(tmp_path / "data")
    (root / "kafka_2").mkdir()
    (root / "kafka_2").chmod(0o755)
    find_open(root, close=True)
    assert mode(root / "kafka_2") == mode(root) == 0o700
    (root / "jobs_2024").mkdir()
    (root / "jobs_2024").chmod(0o755)
    find_open(root, close=True)
    assert mode(root / "jobs_2024") == 0o755


def test_links_are_not_followed_and_other_things_in_the_folder_are_left(tmp_path: Path) -> None:
    root, elsewhere = open_data(tmp_path / "data"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o755)
    (root / "tables" / "link").symlink_to(elsewhere / "file")
    (root / "kafka" / "link").symlink_to(elsewhere)
    for file in (elsewhere / "file", root / "holiday.jpg"):
        file.touch()
        file.chmod(0o644)
    closed = find_open(root, close=True)
    assert (mode(elsewhere), mode(elsewhere / "file"), mode(root / "holiday.jpg")) == (0o755, 0o644, 0o644)
    assert mode(root) == 0o755 and closed.left == [str(root)]
    assert mode(root / "tables") == 0o700
    assert describe_repair(root, closed)[-1] == f"Left as it is, and not private: {root}"


def test_a_secret_that_was_opened_by_hand_is_left_to_the_programs_that_refuse_it(tmp_path: Path) -> None:
    root = open_data(tmp_path / "data")
    (root / "keys" / "tls").mkdir(parents=True)
    (root / "keys").chmod(0o755)
    for name in ("master.json", "tls/ca.crt"):
        (root / "keys" / name).touch()
        (root / "keys" / name).chmod(0o644)
    closed = find_open(root, close=True)
    assert closed.left == [str(root / "keys" / "master.json")] and mode(root / "keys/master.json") == 0o644
    assert mode(root / "keys") == 0o700 and mode(root / "keys/tls/ca.crt") == 0o600


def test_what_belongs_to_another_user_is_left_and_named(tmp_path: Path) -> None:
    root = open_data(tmp_path / "data")
    theirs = root / "tables" / "part.parquet"
    if not CAN_BECOME_ANOTHER_USER:
        return
    os.chown(theirs, OTHER_UID, OTHER_UID)
    closed = find_open(root, close=True)
    assert closed.left == [str(theirs)] and mode(theirs) == 0o644 and len(closed.files) == 1


def test_a_data_directory_that_is_not_there_has_nothing_open(tmp_path: Path) -> None:
    assert describe_repair(tmp_path / "none", find_open(tmp_path / "none", close=True)) == []


def test_up_closes_the_data_directory_and_says_so_and_doctor_finds_it_before(
    cli: Cli, stack_settings: Settings
) -> None:
    root = open_data(stack_settings.data_path)

    def finding() -> dict[str, str]:
        checks = json.loads(cli("doctor", "--json").stdout)["checks"]
        return next(check for check in checks if check["check"] == "privacy")

    before = finding()
    assert before["level"] == "fail" and before["found"].startswith(
        "other users can open 2 files and 4 folders"
    )
    done = cli("up", "--only", "mosquitto")
    assert done.returncode == 0, done.stderr
    assert "Other users could open 2 files and 4 folders" in done.stderr
    assert open_to_others(root) == [] and finding()["level"] == "ok"
    assert "Other users" not in cli("up", "--only", "mosquitto").stderr


def test_the_users_umask_is_known_to_the_programs_that_a_program_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import subprocess, sys; from trunkline_agent import private_files as files\n"
        "files.keep_files_private(); files.keep_files_private()\n"
        "again = 'from trunkline_agent.private_files import *; keep_files_private(); "
        "print(oct(user_umask()))'\n"
        "print(subprocess.run([sys.executable, '-c', again], capture_output=True, text=True).stdout)"
    )
    environment = {name: value for name, value in os.environ.items() if name != USER_UMASK_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT_ROOT,
        env=environment,
        umask=0o027,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0o27"
    monkeypatch.setenv(USER_UMASK_VARIABLE, "none")
    assert user_umask() == PRIVATE_UMASK
