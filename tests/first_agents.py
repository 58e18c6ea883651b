"""The first agent of the docs on a machine of its own, and how long its first answers take."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.agent_hosts import AgentHost, bare
from tests.network_namespaces import Machine
from tests.tutorial_pages import blocks_of

MESSAGES, PRINCIPALS = "/api/hub/messages", "/api/hub/principals"
ANSWER_S, STOP_S = 20, 20
PAGE, PROGRAM, CREDENTIALS = Path("docs/tutorial/first_agent.md"), "echo_agent.py", "echo.json"


@dataclass(frozen=True)
class RoundTrips:
    """How an agent answered.

    Attributes:
        first_ms: From the start of its process to the answer to a message that waited for it.
        next_ms: From the request that sends a message to its answer.
        answers: The payloads of the two answers.
    """

    first_ms: float
    next_ms: float
    answers: list[object]


def first_agent() -> str:
    """The program of the tutorial, as it is printed."""
    (program,) = (block.text for block in blocks_of(PAGE) if block.about == PROGRAM)
    return program


def first_round_trips(
    host: AgentHost, machine: Machine, operator: httpx.Client, name: str, folder: Path
) -> RoundTrips:
    """Run the first agent as the principal `name`, which is made, until it has answered two messages.

    Args:
        host: The environment in which the library is installed.
        machine: Where the agent runs.
        operator: A client of the gateway.
        name: The agent's name.
        folder: The agent's folder, which is made.
    """
    folder.mkdir()
    made = operator.post(PRINCIPALS, json={"principal": name, "role": "worker"}).raise_for_status()
    access = {"schema_version": 1, "name": name, "hub": {"url": machine.url, "token": made.json()["token"]}}
    credentials = folder / CREDENTIALS
    credentials.touch(0o600)
    credentials.write_text(json.dumps(access))
    (folder / PROGRAM).write_text(first_agent())
    _ask(operator, name, "first")
    began = time.monotonic()
    log = folder / "agent.log"
    with log.open("wb") as output:
        command = machine.command([host.python, "-I", PROGRAM])
        agent = subprocess.Popen(command, cwd=folder, env=bare(), stdout=output, stderr=output)
    try:
        answers = [_answer(operator, agent, log)]
        first_s, began = time.monotonic() - began, time.monotonic()
        _ask(operator, name, "second")
        answers.append(_answer(operator, agent, log))
        next_s = time.monotonic() - began
    finally:
        agent.kill()
        agent.wait(STOP_S)
    return RoundTrips(round(first_s * 1000, 1), round(next_s * 1000, 1), answers)


def _ask(operator: httpx.Client, name: str, text: str) -> None:
    body = {"recipient": name, "type": "ask", "payload": {"text": text}}
    operator.post(MESSAGES, json=body).raise_for_status()


def _answer(operator: httpx.Client, agent: subprocess.Popen[bytes], log: Path) -> object:
    """The payload of the next message in the operator's mailbox."""
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        found = operator.get(MESSAGES, params={"wait": 2}).raise_for_status().json()["messages"]
        if found:
            return found[0]["payload"]
        if agent.poll() is not None:
            break
    raise AssertionError(f"no answer; the agent's code is {agent.poll()}: {log.read_text()[-3000:]}")
