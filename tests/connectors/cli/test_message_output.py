"""Messages whose output fails are not taken: a full disk, a reader that has gone, Ctrl-C, an ASCII locale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.settings.settings import PROJECT_ROOT
from tests.connectors.cli.conftest import CommandLine
from tests.failing_outputs import ASCII_LOCALE, FAILING_OUTPUTS, TIMEOUT_S, run_with_failing_output

TEXT = "grün ✓ \U0001f600"
LIBRARY = PROJECT_ROOT / "connectors" / "agent_sdk"


def send(hub: GatewayClient, recipient: str, payload: Any) -> None:
    """Send a message in the operator's name."""
    hub.post(path_of("messages"), {"recipient": recipient, "type": "ask", "payload": payload})


def statuses(hub: GatewayClient, name: str) -> list[str]:
    """The statuses of the messages in a mailbox, oldest first."""
    return [one["status"] for one in hub.get(path_of("mailboxes", "default", name))["messages"]][::-1]


@pytest.fixture
def commands(hub: GatewayClient, trunkline: CommandLine) -> dict[str, tuple[list[str], dict[str, str]]]:
    """The commands that take messages, each with a mailbox of its own and its environment, by their names."""
    python, found = [sys.executable, "-P", "-m"], {}
    given = {
        "drain": ["connectors.cli", "messages", "drain", "--json"],
        "drain as text": ["connectors.cli", "messages", "drain"],
        "receive": ["trunkline_agent.command", "receive", "--json"],
        "receive as text": ["trunkline_agent.command", "receive"],
    }
    for number, (name, arguments) in enumerate(given.items()):
        token = hub.post(path_of("principals"), {"principal": f"bo{number}", "role": "worker"})["token"]
        environment = trunkline.environment() | {
            "TRUNKLINE_TOKEN": token,
            "TRUNKLINE_AGENT_TOKEN": token,
            "TRUNKLINE_HUB_URL": trunkline.settings.gateway_url,
        }
        environment["PYTHONPATH"] = f"{PROJECT_ROOT}{os.pathsep}{LIBRARY}"
        found[name] = ([*python, *arguments], environment)
    return found


@pytest.mark.requirement("DL-50")
def test_messages_whose_output_fails_wait_for_the_next_reader(
    hub: GatewayClient, commands: dict[str, tuple[list[str], dict[str, str]]]
) -> None:
    for number, (name, (command, environment)) in enumerate(commands.items()):
        send(hub, f"bo{number}", {"text": TEXT, "more": "x" * 200_000})
        for output in FAILING_OUTPUTS:
            code, complaint = run_with_failing_output(output, command, environment)
            assert "Traceback" not in complaint, (name, output, complaint)
            assert " taken, " not in complaint, (name, output, complaint)
            assert ("No space left" in complaint) == (output == "full"), (name, output, complaint)
            assert code == {"full": 1, "closed": int("receive" in name), "interrupted": 130}[output], name
            assert statuses(hub, f"bo{number}") == ["unread"], (name, output)
        done = subprocess.run(
            command, capture_output=True, env={**environment, **ASCII_LOCALE}, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, (name, done.stderr)
        shown = done.stdout.decode("utf-8")
        assert (TEXT in shown) or json.loads(shown)["messages"][0]["payload"]["text"] == TEXT, name
        assert statuses(hub, f"bo{number}") == ["claimed"], name


@pytest.mark.requirement("DL-50")
@pytest.mark.requirement("DL-53")
def test_a_reply_whose_output_fails_stays_in_the_mailbox_of_the_asker(
    hub: GatewayClient, trunkline: CommandLine, commands: dict[str, tuple[list[str], dict[str, str]]]
) -> None:
    asks = {
        "drain": ("bo0", ["messages", "send"], ["messages", "send", "--wait-reply", "30s"], "--request-id"),
        "receive": ("bo2", ["send"], ["ask", "--timeout", "30"], "--key"),
    }
    token = hub.post(path_of("principals"), {"principal": "al", "role": "worker"})["token"]
    with GatewayClient(trunkline.settings, token=token) as al:
        for name, (asker, sending, asking, key) in asks.items():
            (*python, program), environment = commands[name][0][:4], commands[name][1]
            question = ["al", "ask", "{}", key, f"question-{asker}", "--json"]
            sent = subprocess.check_output([*python, program, *sending, *question], env=environment)
            answer = {"text": TEXT, "more": "x" * 200_000}
            envelope = {"recipient": asker, "type": "answer", "payload": answer}
            al.post(path_of("messages"), envelope | {"in_reply_to": json.loads(sent)["message_id"]})
            # The same key is the same question, so the reply is there already.
            command = [*python, program, *asking, *question]
            for output in FAILING_OUTPUTS:
                code, complaint = run_with_failing_output(output, command, environment)
                assert code == {"full": 1, "closed": int(name == "receive"), "interrupted": 130}[output], (
                    name,
                    output,
                    complaint,
                )
                assert statuses(hub, asker) == ["unread"], (name, output)
            for _ in range(2):
                shown = json.loads(subprocess.check_output(command, env=environment, timeout=TIMEOUT_S))
                assert shown.get("reply", shown)["payload"] == answer, name
                assert statuses(hub, asker) == ["claimed"], name


@pytest.mark.requirement("DL-50")
def test_a_lone_surrogate_is_printed_as_an_escape(
    hub: GatewayClient, commands: dict[str, tuple[list[str], dict[str, str]]]
) -> None:
    command, environment = commands["receive"]
    send(hub, "bo2", {"text": "x"})
    program = (
        "import sys; from trunkline_agent.command.main import main; "
        "from trunkline_agent.command import message_commands as m; "
        "m.as_json = lambda message: {'text': '\\ud800'}; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *command[4:]],
        capture_output=True,
        env=environment,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"text": "\ud800"}), done.stderr


@pytest.mark.requirement("DL-50")
def test_nothing_is_taken_when_standard_output_is_closed(
    hub: GatewayClient, commands: dict[str, tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    for number, (command, environment) in enumerate(commands.values()):
        send(hub, f"bo{number}", {})
        shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
        done = subprocess.run(shell, stderr=subprocess.PIPE, env=environment, timeout=TIMEOUT_S, check=False)
        assert (done.returncode, b"standard output is closed" in done.stderr) == (2, True), done.stderr
        assert statuses(hub, f"bo{number}") == ["unread"]
