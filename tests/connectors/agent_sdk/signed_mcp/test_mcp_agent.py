"""The sample agent over MCP, as a process of its own: what it needs, what it answers, and when it ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.hub.launcher.launch_spec import read_launchers
from connectors.programs.local_stack import free_port
from connectors.tools.samples.mcp_agent import FINISH, OPERATOR, main
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import wait_until
from tests.connectors.agent_sdk.signed_mcp.conftest import key_pair, write_key
from tests.connectors.agent_sdk.signed_mcp.signed_door import SignedDoor
from tests.forked_programs import forked_command
from tests.programs import start_program

pytestmark = pytest.mark.requirement("AM-09")

RULE = read_launchers(PROJECT_ROOT / "conf" / "launchers.yaml")["trunkline/mcp-agent"]


@contextlib.contextmanager
def agent(url: str, key: Path | str, command: list[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """The agent `ann`, gone when the block ends; with the command of `RULE` as the launcher would start it."""
    names = {"AGENT_ID": "ann", "AGENT_KEY_PATH": str(key), "MCP_SERVER_URL": url}
    process = start_program(
        command or forked_command("connectors.tools.samples.mcp_agent"),
        cwd=RULE.folder(),
        env={"PATH": os.environ["PATH"], **RULE.filled_environment(), **names},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(door: SignedDoor, name: str) -> list[str]:
    """Return the messages of a mailbox."""
    return [message["content"] for message in door.mail_of(name)]


def arguments(door: SignedDoor, tool: str) -> list[dict[str, Any]]:
    """The arguments of all calls of a tool."""
    bodies = [one.document["params"] for one in door.calls()]
    return [body["arguments"] for body in bodies if body["name"] == tool]


@pytest.mark.long
def test_it_reports_idle_answers_what_it_is_told_and_ends_when_the_operator_says_so(
    door: SignedDoor, key_file: Path
) -> None:
    door.gone.add("gus")
    with agent(door.url, key_file, RULE.filled_command()) as process:
        wait_until(lambda: ("ann", "idle") in door.statuses, what="its report")
        for sender, text in (("bo", "hello"), ("gus", "who?"), ("bo", FINISH), ("bo", "bo was told: x")):
            door.write(sender, "ann", text)
        wait_until(lambda: all(message["read"] for message in door.mail_of("ann")), what="its answers")
        assert told(door, "bo") == ["ann was told: hello", "ann was told: finish"]
        assert process.poll() is None
        door.unmarkable.add(door.write("bo", "ann", "last"))
        wait_until(lambda: len(told(door, "bo")) > 2, what="its answer")
        asked = len(arguments(door, "get_my_messages"))
        wait_until(lambda: len(arguments(door, "get_my_messages")) > asked + 1, what="another look")
        door.write(OPERATOR, "ann", f"{FINISH}\n")
        said, complained = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "answered 3\n")
    assert complained.startswith("an answer was not taken: send_to_agent:")
    assert complained.count("\n") == 1
    assert "unknown_recipient" in complained
    assert told(door, "bo")[2:] == ["ann was told: last"]
    assert {message["id"] for message in door.unread("ann")} == door.unmarkable
    assert [status for _, status in door.statuses[:3]] == ["idle", "working", "idle"]
    assert door.statuses[-1] == ("ann", "idle")
    assert all(given == {"unreadOnly": True} for given in arguments(door, "get_my_messages"))
    assert door.refused == []


@pytest.mark.long
def test_an_answer_has_the_same_idempotency_key_however_often_it_is_sent(
    door: SignedDoor, key_file: Path
) -> None:
    for _ in range(2):
        # Kafka is away for two of the gateway's answers, and the second agent finds the same messages
        # unread, as after a crash between answer and mark.
        door.without_kafka = 2
        door.messages.clear()
        door.write("bo", "ann", "hello")
        door.write("bo", "ann", "again")
        door.write(OPERATOR, "ann", FINISH)
        with agent(door.url, key_file) as process:
            assert process.wait(20) == 0
    answers = [given["idempotencyKey"] for given in arguments(door, "send_to_agent")]
    marks = [given["idempotencyKey"] for given in arguments(door, "mark_read")]
    assert (len(answers), answers[:4]) == (8, answers[4:])
    assert answers[0] == answers[1] == answers[2] != answers[3]
    assert (len(marks), marks[:3]) == (6, marks[3:])
    assert len({*answers, *marks}) == 5


@pytest.mark.long
def test_it_outlives_a_restart_of_the_gateway_and_waits_for_one_that_is_late(key_file: Path) -> None:
    door = SignedDoor(free_port(), {"ann": key_pair()[1]})
    with agent(door.url, key_file) as process:
        for number in (1, 2):
            with door.running():
                door.write("bo", "ann", str(number))
                wait_until(lambda: not door.unread("ann"), what="its answer")
            with socket.create_server(("127.0.0.1", door.port)) as listener:
                # It asks while nobody is there who would answer.
                listener.settimeout(20)
                listener.accept()[0].close()
        with door.running():
            door.write(OPERATOR, "ann", FINISH)
            assert process.wait(20) == 0
    assert told(door, "bo") == ["ann was told: 1", "ann was told: 2"]


@pytest.mark.long
def test_it_ends_when_its_key_is_gone_or_is_refused_or_its_gateway_is_away_for_too_long(
    door: SignedDoor, key_file: Path, tmp_path: Path
) -> None:
    with agent(door.url, key_file) as process:
        wait_until(lambda: door.statuses, what="its report")
        door.keys.clear()
        assert (process.wait(20), process.communicate()[1]) == (
            4,
            "mcp agent: the gateway answers 403: not signed\n",
        )
    door.keys["ann"] = key_pair()[1]
    with agent(door.url, key_file) as process:
        wait_until(lambda: len(door.statuses) > 1, what="its report")
        key_file.unlink()
        assert process.wait(20) == 2
        assert "cannot read the key file" in process.communicate()[1]
    other = write_key(tmp_path / "other.pem", key_pair(1)[0])
    with agent(door.url, other) as process:
        assert (process.wait(20), process.communicate()[1]) == (
            4,
            "mcp agent: the gateway answers 403: not signed\n",
        )
    program = "import sys, connectors.tools.samples.mcp_agent as a; a.GIVE_UP_S = 0.5; sys.exit(a.main())"
    with agent(f"http://127.0.0.1:{free_port()}", other, [sys.executable, "-c", program]) as process:
        assert process.wait(20) == 5
        assert process.communicate()[1] == (
            "mcp agent: the gateway does not answer (ConnectError), given up after 0.5 s\n"
        )


@pytest.mark.long
@pytest.mark.parametrize("text", ['{"text": "finish"}', " finish\n"])
def test_the_operator_ends_it_by_any_door(text: str, door: SignedDoor, key_file: Path) -> None:
    for other in ('"finish"', '["finish"]', '{"text": ["finish"]}', "[" * 2000, "finished", ""):
        door.write(OPERATOR, "ann", other)
    with agent(door.url, key_file) as process:
        wait_until(lambda: not door.unread("ann"), what="its answers")
        assert process.poll() is None
        door.write(OPERATOR, "ann", text)
        assert process.wait(20) == 0
    assert len(told(door, OPERATOR)) == 6


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"AGENT_ID": "", "AGENT_KEY_PATH": ""}, "set AGENT_ID, AGENT_KEY_PATH"),
        ({"AGENT_ID": "a b"}, "an agent's name has letters"),
        ({"MCP_SERVER_URL": "ftp://h"}, "http://host:port"),
        ({"AGENT_KEY_PATH": "."}, "the key file . is not a regular file"),
    ],
)
def test_it_says_what_is_wrong_with_its_environment(
    changes: dict[str, str],
    why: str,
    key_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"AGENT_ID": "ann", "AGENT_KEY_PATH": str(key_file), "MCP_SERVER_URL": "http://127.0.0.1:9"}
    for name, value in {**given, **changes}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["mcp_agent"])
    code = main()
    said, complained = capsys.readouterr()
    assert (code, said) == (2, "")
    assert complained.startswith("mcp agent: ")
    assert why in complained
    assert complained.count("\n") == 1
