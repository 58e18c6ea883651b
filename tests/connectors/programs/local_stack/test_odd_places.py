"""A stack whose user has no name and no home, in a folder with an odd name, under LANG=C and another clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.programs.local_stack import LocalStack, child_process
from connectors.programs.local_stack.kafka_plan import java_property
from connectors.programs.local_stack.part import child_environment
from connectors.programs.local_stack.part_plan import ALL_PARTS
from connectors.programs.local_stack.stack import check_folders
from schemas.settings.settings import Settings, StorageSettings
from tests.broker_processes import wait_until
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.odd_places import AS_ANOTHER_USER, NO_PLACE, ODD_NAME, folder_of_another_user
from tests.programs import run_program
from trunkline_agent.errors import UsageError

UP_S = 400


@pytest.fixture
def odd_settings() -> Iterator[Settings]:
    """Settings in an odd folder of another user."""
    with folder_of_another_user() as folder:
        settings = settings_in(folder / ODD_NAME)
        yield settings
        child_process.kill_marked(child_process.mark_of(settings.data_path, ""))


@pytest.mark.slow  # the demo's test has another whole stack in such a folder
@pytest.mark.stack
@pytest.mark.spark
@pytest.mark.tmux
@pytest.mark.requirement("OP-50")
@pytest.mark.requirement("OP-51")
def test_a_stack_of_a_user_without_a_name_in_an_odd_folder_runs_a_job_to_its_end(odd_settings: Settings):
    folder = odd_settings.data_path.parent
    variables = {k: v for k, v in child_environment(odd_settings).items() if k not in ("USER", "LOGNAME")}
    command = [*AS_ANOTHER_USER, sys.executable, "-P", "-m", "connectors.cli"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_program([*command, *arguments], timeout_s=UP_S, env=variables | NO_PLACE)

    def trunkline(*arguments: str) -> str:
        done = run(*arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout + done.stderr

    try:
        trunkline("up")
        program = f"{sys.executable} -P -m connectors.cli publish --job $TRUNKLINE_JOB_ID --event"
        acts = f"{program} started && {program} completed --detail 'über alles'"
        shown = trunkline(
            "jobs", "submit", "--session", "odd", "speak", "--timeout", "120s", "--", "sh", "-c", acts
        )
        assert "completed  über alles" in shown, shown
        trunkline("doctor")  # exit code 0: no check fails
        log = odd_settings.data_path / "sessions" / "odd" / "screen.log"
        assert log.exists(), "tmux wrote the log somewhere else"
        job = shown.split("job ")[1].split()[0]
        assert (Path(odd_settings.table_path("ledger")) / "_delta_log").is_dir()
        export = ["jobs", "export", job, "--to", str(folder / ODD_NAME / "exported")]
        wait_until(lambda: run(*export).returncode == 0, what="the job in the ledger", timeout_s=60)
    finally:
        trunkline("down")
    assert [path.name for path in folder.iterdir()] == [ODD_NAME], "a program wrote beside the data directory"


@pytest.mark.mosquitto
@pytest.mark.requirement("OP-51")
def test_mosquitto_runs_in_a_folder_whose_name_has_escapes_of_other_formats(tmp_path: Path):
    settings = settings_in(tmp_path / "a\\b #c %41 $d ")
    with LocalStack(settings, ("mosquitto",)) as stack:
        assert stack["mosquitto"].is_ready
    assert (settings.data_path / "mosquitto" / "mosquitto.db").exists()


@pytest.mark.requirement("OP-51")
@pytest.mark.parametrize("odd", ["\\", "#", "?", "[", "]", "^", "|", "%41", "\n", "\x7f", "\udcff"])
def test_a_folder_that_no_library_of_tables_takes_is_refused_by_its_character(tmp_path: Path, odd: str):
    settings = Settings(data_dir=tmp_path / f"a{odd}b")
    with pytest.raises(UsageError) as refused:
        check_folders(settings, ALL_PARTS)
    assert repr(odd) in str(refused.value) and "data_dir" in str(refused.value)
    elsewhere = settings.model_copy(update={"storage": StorageSettings(tables=str(tmp_path / "tables"))})
    if odd.isprintable():
        check_folders(settings, ("kafka", "mosquitto"))
        check_folders(elsewhere, ALL_PARTS)
    else:
        with pytest.raises(UsageError):
            check_folders(elsewhere, ("mosquitto",))


@pytest.mark.requirement("OP-51")
def test_a_path_in_kafkas_settings_file_has_the_escapes_of_java_properties():
    assert java_property("/tls ö\\#=:\U0001f600") == "/tls \\u00f6\\\\#=:\\ud83d\\ude00"


@pytest.mark.requirement("OP-51")
def test_the_processes_of_one_folder_are_not_those_of_another_whose_name_goes_on(tmp_path: Path):
    one, other = tmp_path / "a", tmp_path / "a#b"
    assert not child_process.mark_of(other, "kafka").startswith(child_process.mark_of(one, ""))
    assert child_process.mark_of(other, "kafka").startswith(child_process.mark_of(other, ""))


@pytest.mark.requirement("OP-50")
@pytest.mark.parametrize("home", ["?", "", "/proc/1/none"])
def test_the_queue_of_a_user_without_a_home_is_in_the_data_directory(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("TRUNKLINE_QUEUE_ROOT", "TRUNKLINE_HOME", "ZOS_MQ_ROOT", "ZOS_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(os, "access", lambda path, _mode: not str(path).startswith("/proc"))
    assert queue_root(Settings()) == Settings().data_path / "queue"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert queue_root(Settings()) == tmp_path / ".local/share/trunkline/queue"
