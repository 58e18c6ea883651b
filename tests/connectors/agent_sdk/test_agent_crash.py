"""Agents that are killed: the message comes again, and what was sent before is not sent a second time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.connectors.agent_sdk import killed_agent
from tests.connectors.doors.http_api.hub_stack import MESSAGES, post
from tests.programs import required_program
from tests.source_files import ROOT

PYTHON, JAVASCRIPT = "python", "javascript"
TOPIC = "killed-agents"


@pytest.fixture
def kind():
    return "sync"


def program(path, point, other, language=PYTHON):
    """The command of the program, and its environment."""
    if language == PYTHON:
        run_by = [sys.executable, killed_agent.__file__]
    else:
        run_by = [
            required_program("nodejs", "node"),
            f"{ROOT}/tests/connectors/agent_sdk/javascript/killed.mjs",
        ]
    command = [*run_by, str(path), point, other]
    return command, {**os.environ, "PYTHONPATH": str(ROOT / "connectors/agent_sdk")}


def run(path, point, other, language=PYTHON):
    """Run the program to its end; its exit code and what it printed."""
    command, environment = program(path, point, other, language)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout.strip() or ended.stderr


@pytest.mark.requirement("AG-10")
@pytest.mark.requirement("AG-92")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PYTHON, PYTHON),
        pytest.param(PYTHON, JAVASCRIPT, marks=pytest.mark.node),
        pytest.param(JAVASCRIPT, PYTHON, marks=pytest.mark.node),
    ],
)
def test_an_agent_that_is_killed_loses_no_message_and_sends_none_twice(hub, joined, tmp_path, first, second):
    agent, other = joined(), joined()
    path = tmp_path / "agent.json"
    agent.credentials.save(path)
    other.subscribe(TOPIC)
    post(hub.operator, agent.name, 42)
    in_a_loop = (PYTHON, "after_send") if first == second else (JAVASCRIPT, "loop_after_send")
    assert run(path, "before_send", other.name, first) == (-signal.SIGKILL, "1")
    assert run(path, "after_send", other.name, first) == (-signal.SIGKILL, "2")
    third = run(path, in_a_loop[1], other.name, in_a_loop[0])
    assert third == (-signal.SIGKILL, "3")
    assert run(path, "never", other.name, second) == (0, "4")
    answers = hub.operator.get(MESSAGES).json()["messages"]
    assert [(one["payload"], one["type"]) for one in answers] == [({"done": 42}, "answer")]
    found = sorted(json.dumps(one.payload, sort_keys=True) for one in other.iterate(wait_s=1))
    assert found == ['{"about": 42}', '{"half": 0.5, "of": 42}', '{"n": 1}']
    other.unsubscribe(TOPIC)
    assert agent.receive(wait_s=0) is None


@pytest.mark.requirement("AG-08")
def test_ctrl_c_ends_the_wait_for_a_message_at_once_and_gives_the_last_one_back(hub, joined, tmp_path):
    agent = joined()
    path = tmp_path / "agent.json"
    agent.credentials.save(path)
    post(hub.operator, agent.name, "first")
    post(hub.operator, agent.name, "second")
    command, environment = program(path, "wait", "-")
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert [process.stdout.readline() for _ in range(3)] == [b"waits\n", b"first\n", b"second\n"]
        time.sleep(1.0)  # it waits for a third message
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert time.monotonic() - began < 5 and b"KeyboardInterrupt" in said
    statuses = [
        one["status"] for one in hub.operator.get(f"/api/hub/mailboxes/default/{agent.name}").json()["messages"]
    ]
    assert statuses == ["claimed", "claimed"]
