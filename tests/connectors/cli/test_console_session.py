"""The console's requests to a gateway, and its error messages at an end (XP-10, XP-15)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.settings.settings import GatewaySettings, Settings
from tests.broker_processes import wait_until
from tests.connectors.agent_sdk.small_server import Heard, answer, serving
from tests.connectors.cli.conftest import WAIT_S, CommandLine
from tests.connectors.cli.console_terminal import Terminal
from tests.forked_programs import forked_command
from tests.programs import start_program

pytestmark = [pytest.mark.requirement(identity) for identity in ("XP-10", "XP-15")]

Piped = Callable[..., subprocess.Popen[str]]
PERSON = {"listener": "ann", "root_tag": "ann", "namespace": "urn:x:1", "capability": "", "type": "human"}


def leased(number: int, body: str = "soup", **more: Any) -> dict[str, Any]:
    """A message as the gateway hands it out."""
    texts = {"listener": "ann", "message_id": f"m{number}", "request_id": "r", "sender": "bob", "kind": "note"}
    return {**texts, "from_verified": True, "content_type": "text/plain", "body": body, "thread": "t", **more}


class Desk:
    """Answers as a gateway would, with what the test gives it; remembers what it is asked and told."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.suspects = 0
        self.go = threading.Event()
        self.go.set()
        self.asked: list[bool] = []
        self.told: list[dict[str, Any]] = []

    async def answer(self, heard: Heard, writer: asyncio.StreamWriter) -> None:
        """Answer a request of the console."""
        if heard.method == "GET":
            found: dict[str, Any] = {"listeners": [PERSON], "version": 1}
        elif heard.target.endswith("settle"):
            found = self.settled(json.loads(heard.body))
        else:
            found = await asyncio.to_thread(self.lease, json.loads(heard.body))
        writer.write(answer(200, json.dumps(found).encode()))
        await writer.drain()

    def lease(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the waiting messages once they may go; do not wait with suspects, as at a gateway."""
        self.asked.append(asked["alone"])
        self.go.wait(WAIT_S)
        deadline = time.monotonic() + asked["wait_ms"] / 1000
        while not (self.messages or self.suspects) and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        found, self.messages = self.messages, []
        return {"version": 1, "suspects": self.suspects, "messages": found}

    def settled(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Takes all."""
        self.told += asked["done"]
        return {"results": []}

    def outcomes(self) -> dict[str, str]:
        """By message id."""
        return {one["message_id"]: one["outcome"] for one in self.told}


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def trunkline(desk: Desk, tmp_path: Path) -> Iterator[CommandLine]:
    """The command line, with this for a gateway."""
    with serving(desk.answer) as server:
        found = CommandLine(Settings(gateway=GatewaySettings(url=server.access.url), data_dir=tmp_path))
        yield found
        found.end()
        desk.go.set()


@pytest.fixture
def terminal(trunkline: CommandLine) -> Iterator[Terminal]:
    """The console at a terminal, ready."""
    found = Terminal(trunkline.environment(), "console", "ann")
    found.wait_for("> ")
    yield found
    found.close()


@pytest.fixture
def piped(trunkline: CommandLine) -> Piped:
    """Starts the console with pipes; its input ends when the test ends it."""

    def start(**environment: str) -> subprocess.Popen[str]:
        console = start_program(
            [*forked_command("connectors.cli"), "console", "ann"],
            env=trunkline.environment() | environment,
            stdin=subprocess.PIPE,
        )
        trunkline.started.append(console)
        return console

    return start


@pytest.mark.long
def test_suspects_that_cannot_be_had_now_make_no_busy_loop(desk: Desk, terminal: Terminal):
    desk.suspects = 1
    wait_until(lambda: True in desk.asked, what="it asks for a suspect")
    begun, count = time.monotonic(), len(desk.asked)
    wait_until(lambda: time.monotonic() - begun > 1.2)
    assert 2 <= len(desk.asked) - count < 12
    assert False in desk.asked[count:]  # of the others it asks, too
    desk.messages.append(leased(1))
    terminal.wait_for("#1 bob")


@pytest.mark.long
def test_what_was_leased_when_the_input_ends_is_shown_and_told(desk: Desk, terminal: Terminal):
    desk.go.clear()
    asked = len(desk.asked)
    wait_until(lambda: len(desk.asked) > asked, what="it waits for messages")
    terminal.press("\x04")
    terminal.wait_for("\n")  # it has read the end
    desk.messages += [leased(1), leased(2)]
    desk.go.set()
    terminal.wait_for("#2 bob")
    assert terminal.ended() == 0
    assert desk.outcomes() == {"m1": "handled", "m2": "handled"}


@pytest.mark.long
def test_the_output_is_in_utf_8_whatever_the_locale(desk: Desk, piped: Piped):
    console = piped(PYTHONIOENCODING="ascii")
    desk.messages.append(leased(1, "Grüße"))
    wait_until(lambda: desk.told or console.poll() is not None, what="it is shown")
    out, err = console.communicate(timeout=WAIT_S)
    assert (console.returncode, err) == (0, "")
    assert "Grüße" in out


@pytest.mark.long
def test_an_answer_that_is_not_understood_ends_the_session_and_is_said(desk: Desk, terminal: Terminal):
    wrong = leased(1)
    del wrong["thread"]
    desk.messages.append(wrong)
    assert terminal.ended() == 1
    assert "trunkline console: it cannot go on: KeyError: 'thread'" in terminal.seen
    assert "Traceback" not in terminal.seen
    assert desk.told == []


def test_an_output_that_nobody_reads_ends_the_session_and_is_said(desk: Desk, piped: Piped):
    console = piped()
    assert console.stdout is not None
    assert console.stderr is not None
    assert "You are ann" in console.stdout.readline()
    console.stdout.close()
    desk.messages.append(leased(1))
    assert console.wait(WAIT_S) == 1  # though its input has not ended
    assert (
        console.stderr.read() == "trunkline console: it cannot go on: BrokenPipeError: [Errno 32] Broken pipe\n"
    )
    assert desk.told == []
