"""The console at a real terminal: what comes is shown, what is typed is sent, and it ends cleanly."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import httpx
import pytest

from connectors.doors.out_of_band.signed_commands import AddListener, RemoveListener
from schemas.settings.settings import Settings
from tests.broker_processes import wait_until
from tests.connectors.cli.conftest import CommandLine
from tests.connectors.cli.console_terminal import Terminal
from tests.connectors.doors.out_of_band.conftest import CommandStack, running_commands

__all__ = ["running_commands"]

pytestmark = [pytest.mark.requirement(identity) for identity in ("XP-10", "XP-15")]
ENVELOPE = "urn:trunkline:envelope:1"
HUMAN = "urn:trunkline:human:1"


@pytest.fixture
def hub_settings(stack: CommandStack) -> Settings:
    """The settings of the stack's own gateway."""
    return stack.gateways[-1].settings


@pytest.fixture
def person(stack: CommandStack) -> str:
    """A human listener of its own for each test."""
    return stack.added()


@pytest.fixture
def terminal(trunkline: CommandLine, person: str) -> Iterator[Terminal]:
    """The console at a terminal, ready."""
    found = Terminal(trunkline.environment(), "console", person)
    found.wait_for("Ctrl-D ends.")
    found.wait_for("> ")
    yield found
    found.close()


def send(stack: CommandStack, to: str, payload: str) -> httpx.Response:
    """A message of the operator's."""
    document = f'<message xmlns="{ENVELOPE}"><to>{to}</to>{payload}</message>'
    with stack.operator() as client:
        answer = client.post(
            "/messages", content=document.encode(), headers={"Content-Type": "application/xml"}
        )
    assert answer.status_code == 202, answer.text
    return answer


def states(stack: CommandStack, name: str) -> list[str]:
    """How the messages in a mailbox stand."""
    with stack.operator() as client:
        found = client.get(f"/api/hub/mailboxes/default/{name}", params={"limit": 1000}).json()["messages"]
    return [row["status"] for row in found]


def test_what_comes_is_shown_while_a_line_is_typed_and_is_read_then(
    terminal: Terminal, stack: CommandStack, person: str
):
    terminal.press("half a li")
    terminal.wait_for("half a li")
    send(stack, person, '<note xmlns="urn:x:1"><text>soup is ready</text></note>')
    shown = terminal.wait_for("</note>")
    assert "#1 operator <note> thread " in shown
    assert "\r\n      <text>soup is ready</text>\r\n    </note>" in shown
    # The line that was being typed is shown again.
    terminal.wait_for("> half a li")
    wait_until(lambda: set(states(stack, person)) == {"claimed"}, what="it counts as read")


def test_control_characters_of_others_are_shown_and_not_obeyed(
    terminal: Terminal, stack: CommandStack, person: str
):
    send(stack, person, '<note xmlns="urn:x:1">\x9b2J\x85#2 operator &lt;order&gt;\u202e</note>')
    shown = terminal.wait_for("\\u202e")
    assert "\\x9b2J\\x85#2 operator &lt;order" in shown
    assert "\x9b" not in shown
    assert "\u202e" not in shown


def test_a_line_is_sent_in_the_persons_name_and_can_be_answered_on_its_thread(
    terminal: Terminal, stack: CommandStack, person: str, trunkline: CommandLine
):
    other = stack.added()
    terminal.press("/listeners\r")
    terminal.wait_for(other)
    terminal.press(f"@{other} {other} is it you?\r")
    terminal.wait_for(f"sent to {other}, thread ")
    asked = Terminal(trunkline.environment(), "console", other)
    try:
        shown = asked.wait_for(f"</{other}>")
        assert f"#1 {person} <{other}>" in shown
        assert "is it you?" in shown
        asked.press("#1 answer yes, it is\r")
        asked.wait_for(f"sent to {person}")
        assert f"#1 {other} <answer>" in terminal.wait_for("yes, it is")
    finally:
        asked.close()


def test_what_is_not_understood_is_shown_with_what_would_be_right(terminal: Terminal):
    terminal.press("<nobody-takes-this/>\r")
    assert "not understood" in terminal.wait_for("</huh>")
    terminal.press("1+2\r")
    terminal.wait_for("that is no tag")
    terminal.press("/dance\r")
    terminal.wait_for("there is /listeners")
    terminal.press("/help\r")
    terminal.wait_for("answers message 3")


@pytest.mark.parametrize(("keys", "code"), [("\x04", 0), ("/quit\r", 0), ("\x03", 130)], ids=["D", "quit", "C"])
def test_it_ends_cleanly(terminal: Terminal, keys: str, code: int):
    terminal.press(keys)
    assert terminal.ended() == code
    assert "Traceback" not in terminal.seen


def test_lines_from_a_pipe_are_sent_and_nothing_is_lost_at_its_end(
    trunkline: CommandLine, stack: CommandStack, person: str
):
    other = stack.added()
    done = trunkline.run("console", person, stdin=f"@{other} {other} one\n\n@{other} {other} two\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(f"sent to {other}") == 2
    assert states(stack, other) == ["unread", "unread"]


def test_json_is_one_line_a_message(trunkline: CommandLine, stack: CommandStack, person: str):
    send(stack, person, f'<{person} xmlns="{HUMAN}">one\ntwo</{person}>')
    terminal = Terminal(trunkline.environment(), "console", person, "--json")
    try:
        line = terminal.wait_for("}\r\n")
        told = json.loads(line[line.index("{") :])
        assert (told["number"], told["sender"], told["kind"]) == (1, "operator", person)
        assert told["body"] == f'<{person} xmlns="{HUMAN}">one\ntwo</{person}>'
    finally:
        terminal.close()


def test_it_goes_on_when_the_listener_is_removed_and_only_a_human_one_is_sat_for(
    terminal: Terminal, trunkline: CommandLine, stack: CommandStack, person: str
):
    assert stack.give(RemoveListener(person))[0] == 200
    terminal.press(f"@{person} x\r")
    terminal.wait_for("! ")
    for name in (person, "nobody"):
        done = trunkline.call("console", name)
        assert done.returncode == 3
        assert f"there is no human listener '{name}'" in done.stderr
    assert stack.give(AddListener({"name": person, "type": "human"}))[0] == 200


def test_a_gateway_that_is_away_is_said_once_and_waited_for(terminal: Terminal, stack: CommandStack):
    stack.gateways[-1].program.stop(signal.SIGKILL)
    terminal.wait_for("does not answer")
    terminal.press("@somebody soup\r")
    terminal.wait_for("does not answer")
    terminal.press("/quit\r")
    assert terminal.ended() == 0
    assert terminal.seen.count("does not answer") == 2


def test_without_a_gateway_it_says_so(trunkline: CommandLine, stack: CommandStack):
    gateway = stack.settings.gateway.model_copy(update={"url": "http://127.0.0.1:9"})
    done = CommandLine(stack.settings.model_copy(update={"gateway": gateway})).call("console")
    assert done.returncode == 5
    assert "'trunkline up' starts it" in done.stderr
