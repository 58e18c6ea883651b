"""The command line's frame: help, wrong commands, wrong settings, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.cli.main import COMMANDS, Command, main
from schemas.settings.settings import PROJECT_ROOT
from tests.forked_programs import forked_command
from tests.programs import run_program

TIMEOUT_S = 60


def run_cli(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_program(
        [*forked_command("connectors.cli"), *arguments],
        timeout_s=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT), **variables},
    )


def test_help_names_every_command_once_and_stays_on_one_screen(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        assert [line for line in lines if line.startswith(f"  {name} ")] == [f"  {name:<14}{command.summary}"]
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 100


@pytest.mark.long
@pytest.mark.requirement("OP-04")
@pytest.mark.parametrize("arguments", [("up", "--only", "mosquitto"), ("demo", "--data-dir", "/proc/x")])
def test_a_data_directory_that_cannot_be_made_is_one_line_and_no_traceback(arguments: tuple[str, ...]):
    done = run_cli(*arguments, TRUNKLINE__DATA_DIR="/proc/x", TRUNKLINE_CONF=os.devnull)
    lines = [line for line in done.stderr.splitlines() if line.startswith("trunkline")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and "the data directory /proc/x cannot be used" in lines[0]
    assert "TRUNKLINE__DATA_DIR" in lines[0] and "Traceback" not in done.stderr


def test_help_imports_nothing_but_the_standard_library():
    program = (
        "import sys; from connectors.cli.main import main; main(['--help']);"
        "ours = {'connectors', 'schemas', 'trunkline_agent'};"
        "names = {name.partition('.')[0] for name in sys.modules} - ours - {'__main__'};"
        "print(sorted(n for n in names if n not in sys.stdlib_module_names), file=sys.stderr)"
    )
    done = run_program(
        [sys.executable, "-S", "-P", "-c", program],
        timeout_s=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": f"{PROJECT_ROOT}{os.pathsep}{PROJECT_ROOT / 'connectors/agent_sdk'}"},
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: trunkline {name}" in capsys.readouterr().out


def test_an_unknown_command_suggests_the_closest(capsys: pytest.CaptureFixture[str]):
    assert main(["stauts"]) == 2
    assert "there is no command 'stauts'. Did you mean 'status'?" in capsys.readouterr().err


def test_a_misspelt_setting_ends_with_2_and_its_name():
    done = run_cli("status", TRUNKLINE__KAFKA__TOPPIC="x")
    assert done.returncode == 2
    assert "kafka.toppic" in done.stderr
    assert "Traceback" not in done.stderr


def raising(raised: str, folder: Path) -> None:
    """Make the module of a command that raises."""
    (folder / "raising.py").write_text(
        f"from trunkline_agent import errors\nARGUMENTS = ()\ndef run(call): raise {raised}\n"
    )


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("errors.TrunklineError('w')", 1),
        ("errors.UsageError('w')", 2),
        ("errors.NotFound('w')", 3),
        ("errors.Refused('w')", 4),
        ("errors.BackboneUnreachable('w')", 5),
    ],
)
def test_an_error_ends_with_its_exit_code_and_is_one_line(
    raised: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    raising(raised, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "raise", Command("raising", "raises", "Tests"))
    monkeypatch.delitem(sys.modules, "raising", raising=False)
    assert main(["raise"]) == code
    assert capfd.readouterr() == ("", "trunkline raise: w\n")


@pytest.mark.long
@pytest.mark.parametrize(("raised", "code"), [("KeyboardInterrupt", 130), ("BrokenPipeError", 0)])
def test_an_end_by_the_user_or_the_reader_has_its_exit_code_and_no_traceback(
    raised: str, code: int, tmp_path: Path
):
    raising(raised, tmp_path)
    program = (
        "import sys; from connectors.cli.main import COMMANDS, Command, main;"
        "COMMANDS['raise'] = Command('raising', 'raises', 'Tests'); sys.exit(main(['raise']))"
    )
    done = run_program(
        [sys.executable, "-P", "-c", program],
        timeout_s=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": f"{PROJECT_ROOT}{os.pathsep}{tmp_path}"},
    )
    assert (done.returncode, done.stderr, done.stdout) == (code, "", "")


def test_a_reader_that_has_gone_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "connectors.cli", "--help"],
            env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_wrapper_finds_its_checkout_through_a_link_from_anywhere(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "direct").symlink_to(PROJECT_ROOT / "trunkline")
    (tmp_path / "trunk").symlink_to("bin/direct")
    # A folder of this name where one stands must not be taken for ours.
    (tmp_path / "connectors").mkdir()
    done = subprocess.run(
        ["./trunk", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "usage: trunkline COMMAND [arguments]")


def test_bench_lists_programs_and_names_what_there_is_for_an_unknown_one(capsys: pytest.CaptureFixture[str]):
    assert main(["bench"]) == 0
    capsys.readouterr()
    assert main(["bench", "nothing"]) == 3
    assert "no benchmark 'nothing'; there are:" in capsys.readouterr().err


def test_commands_are_modules_of_the_command_line():
    assert all(isinstance(command, Command) for command in COMMANDS.values())
    assert all(command.module.startswith("connectors.cli.") for command in COMMANDS.values())
