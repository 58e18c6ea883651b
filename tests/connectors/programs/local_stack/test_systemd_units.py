"""The systemd units that `trunkline install --systemd` writes, as systemd's own tools see them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from connectors.cli.main import main
from connectors.programs.local_stack.part_plan import ALL_PARTS
from connectors.programs.local_stack.systemd_units import TARGET, unit_name, units
from schemas.settings.settings import PROJECT_ROOT, settings_environment
from tests.connectors.programs.local_stack.conftest import Foreground, settings_in
from tests.odd_places import AS_ANOTHER_USER, GID, UID, folder_of_another_user
from tests.programs import required_program

pytestmark = pytest.mark.requirement("DP-04")

EXPOSURE_MOST = 3.0


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the units of all parts."""
    assert main(["install", "--systemd", "--units", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "systemctl daemon-reload" in said and "useradd" in said
    return tmp_path


def values_of(unit: str, name: str) -> list[str]:
    """The words of all lines `name=…` of a unit, which have nothing that systemd replaces."""
    return [
        word.replace("%%", "%")
        for line in re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)
        for word in shlex.split(line)
    ]


def test_systemd_finds_no_fault_in_the_units(written: Path) -> None:
    assert {path.name for path in written.iterdir()} == {TARGET, *map(unit_name, ALL_PARTS)}
    analyze = required_program("systemd", "systemd-analyze")
    done = subprocess.run(
        [analyze, "verify", *sorted(written.iterdir())], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_services_are_open_to_little(written: Path) -> None:
    analyze = required_program("systemd", "systemd-analyze")
    for path in sorted(written.glob("*.service")):
        done = subprocess.run(
            [analyze, "security", "--offline=true", str(path)], capture_output=True, text=True, timeout=60
        )
        found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
        assert found is not None, done.stderr
        assert float(found[1]) <= EXPOSURE_MOST, path.name


def test_a_dry_run_prints_the_units_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install", "--systemd", "--dry-run", "--only", "gateway", "--units", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"# {tmp_path / 'trunkline-gateway.service'}\n" in said and f"# {tmp_path / TARGET}\n" in said
    assert not list(tmp_path.iterdir())


def test_the_units_follow_the_account_and_the_data_directory() -> None:
    found = units(["mosquitto", "bridge"], "other", Path('/srv/100% "mine"'))
    bridge = found["trunkline-bridge.service"]
    assert "\nUser=other\n" in bridge and '\nReadWritePaths="/srv/100%% \\"mine\\""\n' in bridge
    assert "StateDirectory=" not in bridge and "After=network.target trunkline-mosquitto.service\n" in bridge
    accounts = 'Environment="TRUNKLINE__MQTT__ACCOUNTS_DIR=/srv/100%% \\"mine\\"/mosquitto/accounts"'
    assert accounts in bridge
    for folder in ("/var/lib", "/var/lib/../srv", "/var/lib/a:b"):
        assert "\nReadWritePaths=" in units(["bridge"], "other", Path(folder))["trunkline-bridge.service"]
    assert values_of(
        units(["bridge"], "other", Path("/var/lib/a b"))["trunkline-bridge.service"], "StateDirectory"
    ) == ["a b"]
    alone = units(["bridge"])["trunkline-bridge.service"]
    assert "ACCOUNTS_DIR" not in alone and '\nStateDirectory="trunkline"\n' in alone
    assert values_of(alone, "ExecStart") == [str(PROJECT_ROOT / "trunkline"), "run", "bridge"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--systemd"),
        (["--systemd", "--only", "everything"], "no such part: everything"),
        (["--systemd", "--data-dir", "here"], "not an absolute path"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.stack
def test_the_commands_of_the_units_run_as_written_for_a_user_without_a_name(tmp_path: Path) -> None:
    with folder_of_another_user() as folder, ExitStack() as opened:
        data = folder / "data"
        # As systemd makes it: of the user, and private.
        data.mkdir(0o700)
        os.chown(data, UID, GID)
        own = settings_environment(settings_in(data))
        started = []
        for name, unit in units(["kafka", "mosquitto", "bridge"], data_dir=data).items():
            if name == TARGET:
                continue
            variables = dict(pair.split("=", 1) for pair in values_of(unit, "Environment"))
            environment = {"PATH": os.environ["PATH"], **own, **variables}
            command = [*AS_ANOTHER_USER, *values_of(unit, "ExecStart")]
            part = Foreground(command, environment, tmp_path / f"{name}.out")
            opened.callback(part.close)
            part.wait_ready()
            started.append(part)
        assert [part.end() for part in reversed(started)] == [0, 0, 0]
        assert all(part.lines() for part in started)
        assert {path.stat().st_uid for path in data.rglob("*")} == {UID}
