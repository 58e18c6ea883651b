"""`trunkline tail` shows the ledger: aligned lines for people, JSON for programs, agents' text only shown."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from connectors.cli.main import main
from connectors.log.ledger_files.ledger_export import JSON_COLUMNS
from schemas.settings.settings import Settings
from schemas.tables.ledger import COLUMNS
from tests.connectors.ledger_tables import SECRET, LedgerTable, settings_below
from tests.forked_programs import forked_command
from tests.programs import start_program
from trunkline_agent.terminal_text import escaped

JOB = "0a1b2c3d"
WAIT_S = 20.0
HOSTILE = "red \x1b[31m \x9b0m bidi \u202e\u2066 zero\u200b line\u2028 break\n bell\x07"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    found = settings_below(tmp_path)
    monkeypatch.setenv("TRUNKLINE__DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TRUNKLINE__STORAGE__TABLES", str(found.storage.tables))
    return found


@pytest.fixture
def table(settings: Settings) -> LedgerTable:
    found = LedgerTable(settings)
    found.commit(found.registered(JOB), found.event(JOB, 1, "begins"))
    found.commit(
        found.event(JOB, 3, "later one"),
        found.event(JOB, 2, "wrote /home/ann/x"),
        found.message(f"job/{JOB}", b"{\xff"),
    )
    return found


@pytest.fixture
def tail(settings: Settings, tmp_path: Path) -> Iterator[Any]:
    """Starts `tail` as a process of its own; it is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [*forked_command("connectors.cli"), "tail", *arguments]
        process = start_program(command, env=os.environ | {"TRUNKLINE_CONF": os.devnull})
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=WAIT_S)


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def _shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["tail", "--no-follow", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_each_row_is_one_aligned_line(table: LedgerTable, capsys: pytest.CaptureFixture[str]) -> None:
    heading, registered, started, third, second, broken = _shown(capsys)
    column = heading.index("VERDICT")
    for line, verdict in [(registered, "accepted"), (started, "accepted"), (broken, "rejected")]:
        assert line[column:].startswith(verdict)
        assert line.startswith("2026-09-21T")
        assert f"job/{JOB}" in line
    assert "job.registered" in registered
    assert started.split()[2:] == ["1", "started", "accepted", "begins"]
    assert third.endswith("accepted   later one")
    assert "[late]" in second
    assert "/home/ann" not in second
    assert "[masked detail]" in second
    assert "malformed: not UTF-8" in broken


@pytest.mark.requirement("CM-06")
def test_control_characters_of_an_agent_are_shown_escaped(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    table = LedgerTable(settings)
    # The fold refuses such a detail; its text stands in the ledger all the same, and in the event's name.
    row = table.event(JOB, 1, HOSTILE, event=f"started{HOSTILE}")
    table.commit(row, table.event(JOB, 2, "x")._replace(reason="malformed", why=HOSTILE))
    lines = _shown(capsys)
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert r"red \x1b[31m" in lines[2]
    assert r"\u202e" in escaped(HOSTILE)
    assert escaped("plain: é 漢 ✓") == "plain: é 漢 ✓"


@pytest.mark.requirement("CM-06")
def test_json_lines_hold_no_raw_control_character(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    table = LedgerTable(settings)
    raw = json.dumps({"detail": HOSTILE}, ensure_ascii=False).encode()
    table.commit(table.message(f"job/{JOB}", raw))
    (line,) = _shown(capsys, "--json")
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(json.loads(line)["value"]) == {"detail": HOSTILE}


def test_json_has_every_column_but_what_only_refold_opens(
    table: LedgerTable, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(COLUMNS) - set(JSON_COLUMNS) == {"entries", "value_sealed"}
    rows = [json.loads(line) for line in _shown(capsys, "--json")]
    assert len(rows) == 5
    assert set(rows[0]) == set(JSON_COLUMNS)
    assert rows[1]["logged_at"].endswith(".000000Z")
    assert rows[1]["sent_at"] == "2026-11-21T10:00:00.250000Z"
    assert json.loads(rows[1]["value"])["detail"] == "begins"
    assert rows[1]["changes"][0]["row"]["status"] == "running"
    assert base64.b64decode(rows[4]["value_base64"]) == b"{\xff"
    assert "value" not in rows[4]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--job", JOB], 5),
        (["--stream", f"job/{JOB}"], 5),
        (["--verdict", "rejected"], 1),
        (["--reason", "malformed"], 1),
        (["--door", "mqtt", "--type", "job.event"], 4),
        (["--type", "job.registered"], 1),
        (["-n", "2"], 2),
    ],
)
def test_options_filter_rows(
    table: LedgerTable, capsys: pytest.CaptureFixture[str], arguments: list[str], count: int
) -> None:
    assert len(_shown(capsys, "--json", *arguments)) == count


def test_nothing_found_is_exit_code_3(table: LedgerTable, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tail", "--no-follow", "--job", "ffffffff"]) == 3
    assert capsys.readouterr().out == ""


def test_no_table_is_exit_code_3_and_says_what_to_do(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tail", "--no-follow"]) == 3
    assert "trunkline up" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--job", "NOPE"], ["--stream", "job"], ["-n", "-1"]])
def test_wrong_arguments_are_exit_code_2(table: LedgerTable, arguments: list[str]) -> None:
    assert main(["tail", "--no-follow", *arguments]) == 2


@pytest.mark.long
def test_rows_are_shown_as_they_land_and_ctrl_c_ends_quietly(table: LedgerTable, tail: Any) -> None:
    process = tail("-n", "1", "--json")
    assert "value_base64" in json.loads(_line(process.stdout))
    table.commit(table.event(JOB, 4, "new"))
    assert json.loads(_line(process.stdout))["seq"] == 4
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.long
def test_a_table_that_comes_later_is_shown_from_its_first_row(settings: Settings, tail: Any) -> None:
    process = tail("--json")
    assert "waiting for the ledger" in _line(process.stderr)
    table = LedgerTable(settings)
    table.commit(table.registered(JOB))
    assert json.loads(_line(process.stdout))["type"] == "job.registered"


@pytest.mark.long
def test_it_ends_quietly_when_nobody_reads_any_more(table: LedgerTable, tail: Any) -> None:
    process = tail("--json")
    assert _line(process.stdout)
    process.stdout.close()
    assert process.wait(WAIT_S) == 0
    assert process.stderr.read() == ""
    process.stdout = None


def test_the_secret_of_a_job_is_nowhere_in_the_output(
    table: LedgerTable, capsys: pytest.CaptureFixture[str]
) -> None:
    table.commit(table.event(JOB, 9, f"token={SECRET}", data={"auth_token": SECRET}))
    shown = "\n".join(_shown(capsys, "--json"))
    assert SECRET not in shown
