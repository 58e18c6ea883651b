"""Keys of agents at the agent MCP door (AM-03, AM-08): rotated, taken away, gone with the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.mcp_tools.conftest import PARTICIPANTS, Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body, open_stream
from trunkline_agent.mcp.signing import key_id

pytestmark = pytest.mark.requirement("AM-03")

CallsAs = Callable[[Agent], SignedCaller]


@pytest.fixture
def operator(shared_gateway: McpGateway) -> Iterator[httpx.Client]:
    """A client with the operator's token."""
    with shared_gateway.client() as client:
        yield client


LET_IN, REFUSED = {200}, {403}


def answers(caller: SignedCaller) -> set[int]:
    """Return the statuses of a reading call of the agent and of a call that changes something."""
    bodies = (call_body("get_my_messages"), call_body("update_my_status", status="idle"))
    return {caller.post(body).status_code for body in bodies}


def rotated(agent: Agent, operator: httpx.Client, folder: Path, overlap_s: int) -> Agent:
    """The same agent with a new key."""
    again = Agent(agent.name, folder)
    body = {"public_key": again.public_key, "overlap_s": overlap_s}
    answer = operator.post(f"{PARTICIPANTS}/{agent.name}/keys", json=body)
    assert answer.status_code == 200, answer.text
    return again


@pytest.mark.requirement("AM-08")
def test_both_keys_are_good_for_the_overlap_and_then_the_new_one_alone(
    calls_as: CallsAs, new_agent: Callable[[str], Agent], operator: httpx.Client, tmp_path: Path
) -> None:
    agent = new_agent("rotates")
    old, new = calls_as(agent), calls_as(rotated(agent, operator, tmp_path, 3))
    assert answers(old) == LET_IN
    assert answers(new) == LET_IN
    wait_until(lambda: answers(old) == REFUSED, what="the end of the overlap")
    assert answers(new) == LET_IN


def test_a_rotation_without_an_overlap_ends_the_old_key_at_once(
    calls_as: CallsAs, new_agent: Callable[[str], Agent], operator: httpx.Client, tmp_path: Path
) -> None:
    agent = new_agent("hurries")
    old, new = calls_as(agent), calls_as(rotated(agent, operator, tmp_path, 0))
    assert answers(old) == REFUSED
    assert answers(new) == LET_IN


def test_a_removed_key_is_refused_at_once_and_others_stay(
    calls_as: CallsAs, new_agent: Callable[[str], Agent], operator: httpx.Client, tmp_path: Path
) -> None:
    agent = new_agent("loses")
    old, new = calls_as(agent), calls_as(rotated(agent, operator, tmp_path, 600))
    path = f"{PARTICIPANTS}/{agent.name}/keys/{key_id(agent.public_key)}/remove"
    assert operator.post(path).status_code == 200
    assert answers(old) == REFUSED
    assert answers(new) == LET_IN


def test_a_key_of_another_size_is_as_good(calls_as: CallsAs, operator: httpx.Client, tmp_path: Path) -> None:
    for bits in (2056, 3072, 4096):
        agent = Agent(f"has-{bits}-bits", tmp_path, bits).joined(operator)
        assert answers(calls_as(agent)) == LET_IN


def test_an_agent_that_has_stopped_is_refused_and_its_streams_end(
    shared_gateway: McpGateway, new_agent: Callable[[str], Agent], operator: httpx.Client
) -> None:
    agent = new_agent("stops")
    with SignedCaller(agent, shared_gateway) as caller, open_stream(caller) as stream:
        caller.post(call_body("get_my_messages"), path=stream.path)
        assert stream.answer()["result"]["structuredContent"]["messages"] == []
        assert operator.post(f"{PARTICIPANTS}/{agent.name}/stop").status_code == 200
        assert answers(caller) == REFUSED
        assert caller.post(call_body("get_my_messages"), path=stream.path).status_code == 403
        assert stream.event() == ("end", "")
        assert caller.client.get("/sse", headers=caller.headers()).status_code == 403


def test_an_agent_that_joins_again_is_let_in_by_its_new_key_alone(
    calls_as: CallsAs, new_agent: Callable[[str], Agent], operator: httpx.Client, tmp_path: Path
) -> None:
    agent = new_agent("returns")
    assert operator.post(f"{PARTICIPANTS}/{agent.name}/stop").status_code == 200
    old, new = calls_as(agent), calls_as(Agent(agent.name, tmp_path).joined(operator))
    assert answers(old) == REFUSED
    assert answers(new) == LET_IN


def test_no_two_agents_have_one_key(
    new_agent: Callable[[str], Agent], operator: httpx.Client, tmp_path: Path
) -> None:
    first, other = new_agent("first-with-it"), Agent("copies-it", tmp_path)
    body = {"agent_name": other.name, "public_key": first.public_key}
    answer = operator.post(PARTICIPANTS, json=body)
    assert (answer.status_code, answer.json()["message"]) == (403, "another agent has this key")
    other.joined(operator)
    answer = operator.post(f"{PARTICIPANTS}/{other.name}/keys", json={"public_key": first.public_key})
    assert (answer.status_code, answer.json()["reason"]) == (403, "policy")
