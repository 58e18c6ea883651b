"""A mailbox per token (HH-06, a setting): two tasks of one agent at once, and each gets its own messages."""

from __future__ import annotations

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import MESSAGES, one_of, post

pytestmark = pytest.mark.requirement("HH-06")


def drained(client, request_id=None):
    """Return the answer of a drain."""
    headers = {} if request_id is None else {"X-Request-ID": request_id}
    answer = client.get(MESSAGES, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def payloads(client, request_id=None):
    """Return the texts of a drain's messages."""
    return [message["payload"] for message in drained(client, request_id)["messages"]]


@pytest.fixture(name="apart", scope="module")
def gateway_with_mailboxes_per_token(hub):
    """A gateway where each token has a mailbox, two tasks of one agent there, and the operator's client."""
    hub.add_gateway(mailbox_per_token=True)
    operator = hub.client(gateway=-1)
    wait_until(lambda: "idle" in {agent["name"] for agent in hub.agents(operator)}, what="agents")
    tasks = [hub.submit("idle", at=operator) for _ in range(2)]
    return operator, tasks, [hub.client(task.token, -1) for task in tasks]


def test_each_token_drains_its_own_mailbox_and_then_that_of_its_agent(hub, apart):
    operator, tasks, (first, second) = apart
    addresses = [task.answer["mailbox"] for task in tasks]
    assert addresses == [f"idle.{hub.token_of(task.id)['token_id']}" for task in tasks]
    for address, text in zip([*addresses, "idle", addresses[0]], "abcd", strict=True):
        assert post(operator, address, text).status_code == 200
    # One drain is one record, so it takes from one mailbox; `left` tells of both.
    taken = drained(first)
    assert [message["payload"] for message in taken["messages"]] == ["a", "d"]
    assert taken["left"] == 1
    assert payloads(second) == ["b"]
    assert payloads(second) == ["c"]
    assert payloads(first) == payloads(second) == []


def test_a_repeated_drain_gets_the_same_from_whichever_mailbox_it_was(apart):
    operator, tasks, (first, second) = apart
    assert post(operator, "idle", "shared").status_code == 200
    assert payloads(first, "again") == ["shared"]
    assert post(operator, tasks[0].answer["mailbox"], "own").status_code == 200
    assert payloads(first, "again") == ["shared"]
    # The same id of another token is another drain.
    assert payloads(second, "again") == []
    assert payloads(first, "then") == ["own"] == payloads(first, "then")


def test_an_answer_to_the_sender_reaches_the_task_that_wrote(hub, apart):
    _, tasks, (first, second) = apart
    assert post(second, tasks[0].answer["mailbox"], "question").status_code == 200
    question = one_of(drained(first)["messages"])
    assert question["sender"] == tasks[1].answer["mailbox"]
    assert post(first, question["sender"], "answer").status_code == 200
    assert payloads(first) == []
    assert payloads(second) == ["answer"]
    # The record names the sender: the agent and its task.
    posted = one_of([one.body for one in hub.log() if one.body.get("message_id") == question["id"]])
    assert (posted["from"], posted["from_task"]) == ("idle", tasks[1].id)


@pytest.mark.requirement("HH-09")
def test_a_mailbox_of_a_token_that_is_not_valid_or_not_of_this_agent_is_unknown(hub, apart):
    operator, tasks, _ = apart
    ended = hub.submit("idle", at=operator)
    address = ended.answer["mailbox"]
    assert post(operator, address).status_code == 200
    assert operator.post(f"/api/hub/tasks/{ended.id}/cancel", json={}).status_code == 200
    mailbox = f"/api/hub/mailboxes/default/{address}"
    wait_until(
        lambda: one_of(operator.get(mailbox).json()["messages"])["status"] == "cleared",
        what="what nobody can drain any more is cleared",
    )
    token_id = tasks[0].answer["mailbox"].partition(".")[2]
    for unknown in (address, f"lazy.{token_id}", token_id, f"idle.{token_id[:-1]}", f"idle.{token_id}.x"):
        answer = post(operator, unknown)
        assert (answer.status_code, answer.json()["reason"]) == (404, "unknown_recipient"), unknown
    # Where tokens have no mailboxes, nobody would ever drain it.
    assert post(hub.operator, tasks[0].answer["mailbox"]).status_code == 404
    assert hub.submit("idle").answer["mailbox"] == "idle"


@pytest.mark.requirement("DL-10")
def test_an_agent_owns_the_mailbox_of_its_own_token_alone_when_it_looks_and_replays(apart):
    operator, tasks, (first, second) = apart
    address = tasks[0].answer["mailbox"]
    waits = post(operator, address, "x").json()["message_id"]
    path = f"/api/hub/mailboxes/default/{address}"
    assert waits in {one["message_id"] for one in first.get(path).json()["messages"]}
    # It waits, so it cannot be replayed, but the agent may ask.
    assert first.post(f"{path}/messages/{waits}/replay").status_code == 409
    assert second.get(path).status_code == second.post(f"{path}/messages/{waits}/replay").status_code == 403
    assert payloads(first) == ["x"]
