"""A poll of the file queue whose output fails leaves its messages to the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.agent_sdk.agent_queue.queue_process import PROJECT_ROOT
from tests.failing_outputs import ASCII_LOCALE, FAILING_OUTPUTS, TIMEOUT_S, run_with_failing_output
from trunkline_agent.queue.command_line import main
from trunkline_agent.queue.message_queue import Queue

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "connectors" / "agent_sdk")}


def poll(root: Path, **environment: str) -> list[str]:
    """Poll for ann in a program of its own; returns the bodies of the messages."""
    done = subprocess.run(
        command(root), capture_output=True, env=ENVIRONMENT | environment, timeout=TIMEOUT_S, check=True
    )
    assert done.stderr == b""
    return [json.loads(line)["body"] for line in done.stdout.decode("utf-8").splitlines()]


def command(root: Path) -> list[str]:
    """The command line of a poll for ann."""
    return [sys.executable, "-m", "trunkline_agent.queue", "--root", str(root), "poll", "--agent", "ann"]


@pytest.mark.requirement("DL-50")
@pytest.mark.parametrize("output", FAILING_OUTPUTS)
def test_a_poll_whose_output_fails_leaves_its_messages_to_the_next_one(tmp_path: Path, output: str) -> None:
    bodies = [str(number) + "x" * 100_000 for number in range(3)]
    queue = Queue(tmp_path / "q")
    for body in bodies:
        queue.send("ask", body, "ann")
    code, complaint = run_with_failing_output(output, command(tmp_path / "q"), ENVIRONMENT)
    assert code == {"full": 1, "closed": 0, "interrupted": 130}[output]
    assert ("No space left" in complaint) == (output == "full") and "Traceback" not in complaint
    assert poll(tmp_path / "q") == bodies
    assert poll(tmp_path / "q") == []
    audit = [json.loads(line) for line in (tmp_path / "q" / "audit.jsonl").read_text().splitlines()]
    # The file bridge claims in the mailbox the messages of these lines.
    assert [one["matched"] for one in audit if one["op"] == "poll"] == [3, 0]


@pytest.mark.requirement("DL-50")
def test_a_failed_poll_takes_nothing_from_a_poll_that_was_faster(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "q")
    queue.send("ask", "one", "ann")

    def fail(_: object) -> None:
        queue.send("ask", "two", "ann")
        assert [one["body"] for one in queue.poll("ann")] == ["two"]
        raise OSError("the output is full")

    with pytest.raises(OSError, match="the output is full"):
        queue.poll("ann", show=fail)
    assert queue.poll("ann") == []


@pytest.mark.requirement("DL-50")
def test_a_poll_prints_every_character_in_an_ascii_locale(tmp_path: Path) -> None:
    root = tmp_path / "q"
    assert main(["--root", str(root), "send", "--topic", "ask", "--to", "ann", "--body", "grün ✓"]) == 0
    assert poll(root, **ASCII_LOCALE) == ["grün ✓"]
