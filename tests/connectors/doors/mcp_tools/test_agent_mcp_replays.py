"""A signature of a call that changes something is good once (AM-02), also after a crash and elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from schemas.streams.agents.agent_registry import AGENT_CALLED
from tests.broker_processes import wait_until
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body, logged

pytestmark = pytest.mark.requirement("AM-02")


def is_replay(answer: httpx.Response) -> bool:
    """True if it was refused as one."""
    return answer.status_code == 403 and "used before" in answer.json()["message"]


def knows(caller: SignedCaller) -> bool:
    """True if the gateway has heard of the agent."""
    return caller.post(call_body("discover_agents")).status_code == 200


def test_replays_are_refused_at_once_after_a_crash_and_by_another_gateway(
    start_gateway: Callable[..., McpGateway], tmp_path: Path
) -> None:
    first, second = start_gateway(), start_gateway()
    with first.client() as operator:
        agent = Agent("ann", tmp_path).joined(operator)
    with SignedCaller(agent, first) as here, SignedCaller(agent, second) as there:
        changing = {
            tool: call_body(tool, **arguments)
            for tool, arguments in {
                "send_to_agent": {"targetAgentId": "operator", "message": "once"},
                "broadcast_message": {"message": "once to all"},
                "mark_read": {"messageIds": ["m1"]},
                "update_my_status": {"status": "idle"},
                "no_such_tool": {},
            }.items()
        }
        reading = {tool: call_body(tool) for tool in ("discover_agents", "get_my_messages")}
        signed = {tool: here.headers(body) for tool, body in (changing | reading).items()}
        for tool, body in (changing | reading).items():
            assert here.post(body, signed[tool]).status_code == 200, tool
        wait_until(lambda: knows(there), what="the other gateway")
        for caller in (here, there):
            for tool, body in changing.items():
                assert is_replay(caller.post(body, signed[tool])), tool
            for tool, body in reading.items():
                assert caller.post(body, signed[tool]).status_code == 200, tool
        # One that only the other gateway has seen, and one that nobody has.
        late, fresh = call_body("update_my_status"), call_body("update_my_status", status="working")
        signed["late"], signed["fresh"] = here.headers(late), here.headers(fresh)
        assert there.post(late, signed["late"]).status_code == 200
        first.program.kill()
    again = start_gateway()
    with SignedCaller(agent, again) as caller:
        for tool, body in changing.items():
            assert is_replay(caller.post(body, signed[tool])), tool
        assert is_replay(caller.post(late, signed["late"]))
        assert caller.post(fresh, signed["fresh"]).status_code == 200
        assert is_replay(caller.post(fresh, signed["fresh"]))
        with again.client() as operator:
            answer = operator.get("/api/hub/mailboxes/default/operator").json()
        assert sorted(one["body"] for one in answer["messages"]) == ["once", "once to all"]


def test_of_many_at_once_with_one_signature_one_is_let_in(
    start_gateway: Callable[..., McpGateway], tmp_path: Path
) -> None:
    first, second = start_gateway(), start_gateway()
    with first.client() as operator:
        agent = Agent("ann", tmp_path).joined(operator)
    with SignedCaller(agent, first) as here, SignedCaller(agent, second) as there:
        wait_until(lambda: knows(there), what="the other gateway")
        body = call_body("send_to_agent", targetAgentId="ann", message="once")
        headers = here.headers(body)
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda n: (here, there)[n % 2].post(body, headers).status_code, range(40)))
        assert (answers.count(200), answers.count(403)) == (1, 39)
        assert len(here.messages()) == 1


def test_a_signature_is_remembered_before_the_call_is_looked_at(
    start_gateway: Callable[..., McpGateway], tmp_path: Path
) -> None:
    """In the agent's stream: its digest, and which tool; nothing of what was said."""
    gateway = start_gateway()
    with gateway.client() as operator:
        agent = Agent("ann", tmp_path).joined(operator)
    with SignedCaller(agent, gateway) as caller:
        assert caller.error("send_to_agent", targetAgentId="nobody", message="secret words")["reason"]
        assert caller.error("no such tool!")["reason"] == "not_found"
    called = logged(gateway.settings, AGENT_CALLED)
    assert {one.key for one in called} == {b"agent/ann"}
    assert [b'"tool":"send_to_agent"' in one.value for one in called] == [True, False]
    assert b'"tool":"unknown"' in called[1].value
    assert not any(b"secret" in one.value for one in called)
