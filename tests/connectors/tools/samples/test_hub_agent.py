"""The sample agent: what it needs, what it answers, and when it ends. The hub is a small server here, which is
away at a certain step; `test_hub_tasks.py` has the agent at a real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from connectors.tools.samples import hub_agent
from tests.connectors.agent_sdk.small_server import Heard, answer, serving
from trunkline_agent import Agent, Credentials
from trunkline_agent.errors import Refused, TrunklineError

pytestmark = pytest.mark.requirement("HH-05")

CANARY = "canary-7f3e-token"
TOKEN = "TRUNKLINE_AGENT_TOKEN"
HUB = "TRUNKLINE_HUB_URL"


def agent_environment(**changes: str) -> dict[str, str]:
    """Return the environment that the sample agent needs, with only the path from ours."""
    names = {HUB: "http://127.0.0.1:9", TOKEN: CANARY, "TRUNKLINE_TASK_ID": "t1", "TRUNKLINE_AGENT_NAME": "ann"}
    return {"PATH": os.environ["PATH"], **names, **changes}


@pytest.mark.parametrize(
    ("changes", "code", "why"),
    [
        ({"TRUNKLINE_TASK_ID": ""}, 2, "set TRUNKLINE_TASK_ID"),
        ({TOKEN: ""}, 2, f"no credentials: TRUNKLINE_CREDENTIALS and {TOKEN} are not set"),
        ({HUB: "127.0.0.1:9"}, 2, "not the address of a hub: '127.0.0.1:9'"),
        ({HUB: "http://127.0.0.1:x"}, 2, "not the address of a hub: "),
        ({TOKEN: f"{CANARY}\n"}, 2, "the token "),
        ({}, 5, "the hub at http://127.0.0.1:9 does not answer"),
    ],
)
def test_the_sample_agent_says_what_it_lacks_and_does_not_wait_for_the_hub_for_ever(
    changes: dict[str, str],
    code: int,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hub_agent, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["hub_agent"])
    for name, value in agent_environment(**changes).items():
        monkeypatch.setenv(name, value)
    assert hub_agent.main() == code
    said, complained = capsys.readouterr()
    assert said == ""
    assert complained.startswith(f"hub agent: {why}")
    assert CANARY not in complained


class Hub:
    """A hub with a mailbox. It answers a request with each status in `statuses` first, at which step ever."""

    def __init__(self, *mailbox: dict[str, Any], statuses: dict[str, list[int]] | None = None) -> None:
        self.mailbox = list(mailbox)
        self.statuses = {step: list(found) for step, found in (statuses or {}).items()}
        self.asked: list[tuple[str, Heard]] = []

    async def __call__(self, heard: Heard, writer: asyncio.StreamWriter) -> None:
        step = heard.method if heard.target.partition("?")[0].endswith("/messages") else heard.target[-4:]
        self.asked.append((step, heard))
        status = self.statuses[step].pop(0) if self.statuses.get(step) else 200
        writer.write(answer(status, json.dumps(self._body(step) if status == 200 else {}).encode()))
        await writer.drain()

    def _body(self, step: str) -> object:
        if step == "GET":
            return {"messages": [self.mailbox.pop(0)] if self.mailbox else [], "lease_id": "l1"}
        return {"message_id": "m9", "delivered": True} if step == "POST" else {"refused": []}

    def run(self) -> list[Any]:
        """Let the agent work to its end; what it has sent."""
        with serving(self) as server, Agent("ann", Credentials("ann", server.access)) as agent:
            hub_agent.HubAgent(agent, "t1", "some work").run()
        return [json.loads(heard.body) for step, heard in self.asked if step == "POST"]

    def headers(self, step: str, name: str) -> list[str]:
        """Return a header of each request of a step."""
        return [heard.headers[name] for found, heard in self.asked if found == step]


def message(number: int, kind: str, payload: object) -> dict[str, Any]:
    return {
        "id": f"m{number}",
        "timestamp": 1,
        "sender": "bo",
        "recipient": "ann",
        "type": kind,
        "payload": payload,
    }


def test_the_sample_agent_answers_all_it_is_asked_and_completes_its_task() -> None:
    asks = [message(1, "ask", {"text": "a?"}), message(2, "finish", {}), message(3, "ask", ["b"])]
    hub = Hub(message(0, "news", {}), *asks, statuses={"GET": [503], "POST": [503, 200, 404]})
    first = {"text": "ann was asked: a?", "in_reply_to": "m1"}
    second = {"text": 'ann was asked: ["b"]', "in_reply_to": "m3"}
    assert hub.run() == [
        {"recipient": "bo", "type": "answer", "in_reply_to": "m1", "payload": first},
        {"recipient": "bo", "type": "answer", "in_reply_to": "m1", "payload": first},
        {"recipient": "bo", "type": "answer", "in_reply_to": "m3", "payload": second},
        {"recipient": "hub", "type": "event", "payload": {"event": "task.completed", "result": "answered 1"}},
    ]
    drains = hub.headers("GET", "x-request-id")
    assert drains[0] == drains[1] != drains[2]
    acknowledged = [json.loads(heard.body)["message_ids"] for step, heard in hub.asked if step == "/ack"]
    assert acknowledged == [["m0"], ["m1"], ["m2"], ["m3"]]
    again = Hub(*asks)
    again.run()
    keys = hub.headers("POST", "idempotency-key")
    assert (keys[0], keys[1:]) == (keys[1], again.headers("POST", "idempotency-key"))
    assert len(set(keys)) == 3


def test_the_sample_agent_ends_when_its_token_is_refused_or_what_answers_is_no_hub() -> None:
    with pytest.raises(Refused) as refused:
        Hub(message(0, "news", {}), statuses={"GET": [200, 401]}).run()
    assert refused.value.exit_code == 4
    with pytest.raises(TrunklineError):
        Hub(statuses={"GET": [404]}).run()
    stranger = Hub()
    stranger._body = lambda _step: []  # type: ignore[method-assign]
    with pytest.raises(TrunklineError):
        stranger.run()
