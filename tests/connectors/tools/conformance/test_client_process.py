"""Clients that hang, die, print garbage, flood or stay are reported, within bounds; no process is left."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from connectors.cli.main import main
from connectors.tools.conformance import client_process
from connectors.tools.conformance.client_process import ClientMisbehaved, ClientProcess
from connectors.tools.conformance.run import FAILED, NOT_SUPPORTED, greet, run_checks, wanted_checks
from trunkline_agent.errors import UsageError

PROGRAM = str(Path(__file__).with_name("misbehaving_program.py"))
pytestmark = pytest.mark.requirement("CF-04")


def command(how: str) -> list[str]:
    return [sys.executable, "-I", "-S", PROGRAM, how]


@pytest.fixture(autouse=True)
def _little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_process, "SLACK_S", 1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("hangs", "did not answer sign_event in time"),
        ("dies", "ended with exit code 7 instead of an answer to sign_event"),
        ("garbage", "answered sign_event with a line that is no JSON: 'Traceback: \\x1b[31mred'"),
        ("floods", "answered sign_event with a line of more than 1048576 bytes"),
        ("another_id", "which has not the id 2"),
        ("no_ok", "expected an object `ok` or `error`"),
    ],
)
def test_a_client_that_misbehaves_is_reported_and_killed(how: str, what: str) -> None:
    started = time.monotonic()
    client = ClientProcess(command(how))
    try:
        client.call("hello", protocol=1)
        with pytest.raises(ClientMisbehaved) as caught:
            client.call("sign_event", 0.2, json_base64="", secret="")
        assert what in str(caught.value)
        assert client.noise == "a last word"
    finally:
        client.close()
    assert time.monotonic() - started < 10
    assert is_gone(client)


def is_gone(client: ClientProcess) -> bool:
    try:
        os.killpg(client._process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_answer_without_a_request_is_reported() -> None:
    client = ClientProcess(command("twice"))
    try:
        client.call("hello", protocol=1)
        client.call("sign_event", 1.0, json_base64="", secret="")
        with pytest.raises(ClientMisbehaved, match="without a request"):
            client.call("sign_event", 1.0, json_base64="", secret="")
    finally:
        client.close()


@pytest.mark.long
def test_a_client_that_does_not_read_is_reported() -> None:
    client = ClientProcess(command("reads_nothing"))
    try:
        client.call("hello", protocol=1)
        client.begin("sign_event", 0.1)
        client._waiting_for = None
        with pytest.raises(ClientMisbehaved, match="did not read the request sign_event"):
            client.begin("sign_event", 0.1, json_base64="x" * 500_000)
    finally:
        client.close()
    assert is_gone(client)


@pytest.mark.long
def test_a_client_that_stays_after_close_is_reported() -> None:
    with pytest.raises(ClientMisbehaved, match="still runs 1 s after its answer to close"):
        greet(command("stays"))


def test_a_program_that_does_not_exist_is_named() -> None:
    with pytest.raises(ClientMisbehaved, match="cannot start /no/such/client: No such file"):
        greet(["/no/such/client"])


def test_a_failed_check_has_the_end_of_the_standard_error_and_the_others_go_on() -> None:
    checks = wanted_checks(["signatures", "topics", "canonical_numbers"])
    client = greet(command("dies"))
    first, second, third = run_checks(command("dies"), client, checks, None)
    assert (first.check.name, first.outcome, first.noise) == ("signatures", FAILED, "a last word")
    assert (second.outcome, second.why) == (NOT_SUPPORTED, "the client lacks topics")
    assert (third.check.name, third.outcome) == ("canonical_numbers", FAILED)


def test_an_unknown_check_is_a_wrong_argument() -> None:
    with pytest.raises(UsageError, match="no check typo; --list shows them"):
        wanted_checks(["typo"])


def test_the_command_ends_with_1_for_a_failed_check_and_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["conformance", "--only", "signatures", "--only", "topics"]
    assert main([*given, "--", *command("garbage")]) == 1
    shown = capsys.readouterr().out
    assert "signatures  failed" in shown
    assert "topics is not supported: the client lacks topics" in shown
    assert "\\x1b[31mred" in shown
    assert "stderr: a last word" in shown
    assert main([*given, "--json", "--", *command("garbage")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"passed": 0, "failed": 1, "not supported": 1}
    assert [(one["check"], one["outcome"]) for one in found["results"]] == [
        ("signatures", FAILED),
        ("topics", NOT_SUPPORTED),
    ]


def test_the_command_reports_a_client_that_does_not_greet(capsys: pytest.CaptureFixture[str]) -> None:
    program = "print('hello')"
    assert main(["conformance", "--", sys.executable, "-c", program]) == 1
    shown = capsys.readouterr().err
    assert "the client answered hello with a line that is no JSON: 'hello'" in shown
    assert main(["conformance"]) == 2


def test_the_command_lists_each_check_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "killed_before_ack (hub)" in lines
    assert all(line.startswith("    Check that ") and line.endswith(".") for line in lines[1::2])
