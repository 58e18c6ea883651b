"""The sample agent: what it needs, what it answers, and when it ends. The hub's answers come from a list here,
for a hub that is away at a certain step; `test_hub_tasks.py` has it at a real one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import httpx2
import pytest

from connectors.samples import hub_agent
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
        ({TOKEN: "", "TRUNKLINE_TASK_ID": ""}, 2, f"set {TOKEN}, TRUNKLINE_TASK_ID"),
        ({HUB: "127.0.0.1:9"}, 2, f"{HUB}: expected http://host:port"),
        ({HUB: "http://127.0.0.1:x"}, 2, f"{HUB}: expected http://host:port"),
        ({TOKEN: f"{CANARY}\n"}, 2, f"{TOKEN} holds no token"),
        ({}, 5, "the hub does not answer (ConnectError), given up after 0.5 s"),
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
    assert (hub_agent.main(), *capsys.readouterr()) == (code, "", f"hub agent: {why}\n")


class Hub:
    """Answers the sample agent from a list, and keeps what it is sent."""

    def __init__(self, *answers: httpx2.Response | list[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.asked: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        answer = self.answers.pop(0) if self.answers else httpx2.Response(401)
        return httpx2.Response(200, json={"messages": answer}) if isinstance(answer, list) else answer

    def run(self) -> list[Any]:
        """Let the agent work to its end; what it has sent."""
        with httpx2.Client(base_url="http://hub", transport=httpx2.MockTransport(self)) as client:
            hub_agent.HubAgent(client, "ann", "t1", "some work").run()
        return [json.loads(request.content) for request in self.asked if request.method == "POST"]


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
    good, gone, away = (httpx2.Response(code) for code in (200, 404, 503))
    asks = [message(1, "ask", {"text": "a?"}), message(2, "finish", {}), message(3, "ask", ["b"])]
    hub = Hub(away, [message(0, "news", {})], asks, away, good, gone, good)
    answer = {"text": "ann was asked: a?", "in_reply_to": "m1"}
    assert hub.run() == [
        {"recipient": "bo", "type": "answer", "payload": answer},
        {"recipient": "bo", "type": "answer", "payload": answer},
        {"recipient": "bo", "type": "answer", "payload": {"text": 'ann was asked: ["b"]', "in_reply_to": "m3"}},
        {"recipient": "hub", "type": "event", "payload": {"event": "task.completed", "result": "answered 1"}},
    ]
    drains = [request.headers["X-Request-ID"] for request in hub.asked[:3]]
    assert drains[0] == drains[1] != drains[2]
    again = Hub(asks, good, good, good)
    again.run()
    keys = [request.headers["Idempotency-Key"] for request in (*hub.asked[4:], *again.asked[1:])]
    assert keys[:3] == keys[3:]
    assert (len(set(keys)), hub.asked[3].headers["Idempotency-Key"]) == (3, keys[0])


def test_the_sample_agent_ends_when_its_token_is_refused_or_what_answers_is_no_hub() -> None:
    with pytest.raises(Refused) as refused:
        Hub([]).run()
    assert refused.value.exit_code == 4
    for strange in (httpx2.Response(200, text="hello"), httpx2.Response(200, json=[]), httpx2.Response(404)):
        with pytest.raises(TrunklineError):
            Hub(strange).run()
