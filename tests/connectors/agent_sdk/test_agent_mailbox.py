"""An agent's mailbox at a real gateway: taken, acknowledged, given back, extended and lost messages."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import post
from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import LeaseLost, Refused, UsageError


def rows(hub, name):
    """The messages of a mailbox, as the operator sees them."""
    return hub.operator.get(f"/api/hub/mailboxes/default/{name}").json()["messages"]


def statuses(hub, name):
    return [one["status"] for one in rows(hub, name)]


def filled(hub, name, *payloads):
    """Send messages to a mailbox, as the operator; their ids."""
    return [post(hub.operator, name, payload).json()["message_id"] for payload in payloads]


@pytest.mark.requirement("AG-08")
def test_a_block_that_ends_well_acknowledges_its_message(hub, joined):
    agent = joined()
    ids = filled(hub, agent.name, {"n": 1}, [2], None)
    seen = []
    for message in agent.iterate(wait_s=0):
        with agent.handling(message):
            seen.append((message.id, message.payload, message.sender, message.type, message.attempt))
        # By the block, not when the loop goes on.
        assert (
            next(one for one in rows(hub, agent.name) if one["message_id"] == message.id)["status"] == "claimed"
        )
    payloads = ({"n": 1}, [2], None)
    assert seen == [(one, what, "operator", "note", 1) for one, what in zip(ids, payloads, strict=True)]
    assert set(statuses(hub, agent.name)) == {"claimed"}


@pytest.mark.requirement("AG-08")
def test_a_block_that_raises_gives_its_message_back_with_the_type_of_the_exception(hub, joined):
    agent = joined()
    (message_id,) = filled(hub, agent.name, 1)
    message = agent.receive(wait_s=5)
    with pytest.raises(ValueError, match="the-secret"), agent.handling(message):
        raise ValueError("the-secret")
    (row,) = rows(hub, agent.name)
    assert row["status"] == "unread" and "the-secret" not in str(row)
    again = agent.receive(wait_s=5)
    assert (again.id, again.attempt) == (message_id, 2)
    agent.nack(again, "as I like")
    agent.nack(again, "twice changes nothing")
    with pytest.raises(UsageError, match="is given back already"):
        agent.ack(again)
    for _ in range(3):
        with pytest.raises(KeyError), agent.handling(agent.receive(wait_s=5)):
            raise KeyError("the-secret")
    (row,) = rows(hub, agent.name)
    assert row["status"] == "dead" and "KeyError" in str(row) and "the-secret" not in str(row)


@pytest.mark.requirement("AG-08")
def test_a_loop_without_blocks_acknowledges_when_it_goes_on_and_gives_back_when_it_ends(hub, joined):
    agent = joined()
    ids = filled(hub, agent.name, 1, 2, 3, 4)
    found = agent.iterate(limit=3, wait_s=0)
    assert [next(found).payload, next(found).payload] == [1, 2]
    by_id = {one["message_id"]: one["status"] for one in rows(hub, agent.name)}
    assert [by_id[one] for one in ids] == ["claimed", "leased", "leased", "unread"]
    found.close()
    assert sorted(statuses(hub, agent.name)) == ["claimed", "unread", "unread", "unread"]
    assert [message.payload for message in agent.iterate(limit=2, wait_s=0)] == [2, 3, 4]
    assert set(statuses(hub, agent.name)) == {"claimed"}


@pytest.mark.requirement("AG-08")
def test_an_agent_that_is_closed_gives_its_messages_back(hub, joined):
    agent = joined()
    filled(hub, agent.name, 1, 2)
    assert agent.receive(wait_s=5).payload == 1
    agent.agent.close() if agent.__class__.__name__ == "SyncPlayer" else agent.loop.run(agent.agent.close())
    assert statuses(hub, agent.name) == ["unread", "unread"]


@pytest.mark.requirement("AG-08")
def test_the_iteration_waits_for_the_next_message_and_ends_after_wait_s(hub, joined):
    agent = joined()
    timer = threading.Timer(0.4, filled, (hub, agent.name, "late"))
    timer.start()
    began = time.monotonic()
    assert [message.payload for message in agent.iterate(wait_s=1.5)] == ["late"]
    assert 1.5 < time.monotonic() - began < 8
    timer.join()
    assert agent.receive(wait_s=0) is None


@pytest.mark.requirement("AG-08")
def test_messages_without_a_lease_are_taken_for_good(hub, joined):
    agent = joined()
    filled(hub, agent.name, 1, 2)
    message = agent.receive(lease_s=None, wait_s=5)
    assert (message.payload, message.attempt) == (1, None)
    with pytest.raises(ValueError, match="lost"), agent.handling(message):
        raise ValueError("lost")
    assert sorted(statuses(hub, agent.name)) == ["claimed", "unread"]


@pytest.mark.requirement("AG-09")
def test_a_lease_is_extended_while_a_block_runs(hub, joined):
    agent = joined()
    filled(hub, agent.name, 1, 2)
    for message in agent.iterate(limit=2, lease_s=1, wait_s=0):
        with agent.handling(message):
            agent.sleep(2.5)
            assert not message.lease_lost and agent.receive(wait_s=0) is None
    assert [(one["status"], one["attempts"]) for one in rows(hub, agent.name)] == [
        ("claimed", 1),
        ("claimed", 1),
    ]


@pytest.mark.requirement("AG-09")
def test_a_message_that_another_consumer_has_is_reported_as_lost(hub, joined):
    agent = joined()
    other = joined(credentials=agent.credentials)
    filled(hub, agent.name, 1)
    message = agent.receive(lease_s=1, wait_s=5)
    agent.agent._leases._held._held.clear()  # as an agent that hangs: nothing extends the lease
    theirs = other.receive(wait_s=10)
    with pytest.raises(LeaseLost, match="could not be acknowledged") as failed, agent.handling(message):
        pass
    assert failed.value.reason == "lease_lost" and message.lease_lost
    other.ack(theirs)
    assert statuses(hub, agent.name) == ["claimed"]


@pytest.mark.requirement("AG-09")
def test_a_block_can_see_that_the_lease_is_lost(hub, joined):
    agent = joined()
    (message_id,) = filled(hub, agent.name, 1)
    message = agent.receive(lease_s=1, wait_s=5)
    body = {"lease_id": message.held.lease_id, "message_ids": [message_id], "reason": "by another program"}
    client = hub.client(agent.credentials.hub.token)
    assert client.post("/api/hub/messages/nack", json=body).json()["done"] == [message_id]

    def is_lost():
        agent.sleep(0.05)
        return message.lease_lost

    wait_until(is_lost, 10, "the extension is refused")


@pytest.mark.requirement("AG-99")
def test_a_message_whose_handler_hangs_is_handed_out_again_and_the_handler_is_told(hub, joined):
    agent = joined()
    other = joined(credentials=agent.credentials)
    filled(hub, agent.name, 1)
    message = agent.receive(lease_s=60, wait_s=5, longest_s=1.0)

    def again():
        agent.sleep(0.05)  # an event loop that runs
        return other.receive(wait_s=0)

    theirs = wait_until(again, 10, "the message is handed out again")
    assert (theirs.id, theirs.attempt, message.lease_lost) == (message.id, 2, True)
    assert rows(hub, agent.name)[0]["last_reason"] == "it was handled for longer than 1 s"
    with pytest.raises(LeaseLost, match="longer than 1 s"):
        agent.ack(message)
    other.ack(theirs)
    assert statuses(hub, agent.name) == ["claimed"]


@pytest.mark.requirement("AG-99")
def test_each_message_of_a_loop_has_its_own_time(hub, joined):
    agent = joined()
    filled(hub, agent.name, 1, 2, 3)
    for message in agent.iterate(limit=3, lease_s=1, wait_s=0, longest_s=2.0):
        agent.sleep(1.2)
        assert not message.lease_lost
    assert statuses(hub, agent.name) == ["claimed"] * 3
    assert {one["attempts"] for one in rows(hub, agent.name)} == {1}


@pytest.mark.requirement("AG-99")
def test_a_handling_without_a_longest_time_has_no_end(hub, joined):
    agent = joined()
    filled(hub, agent.name, 1)
    message = agent.receive(lease_s=1, wait_s=5, longest_s=None)
    agent.sleep(2.5)
    agent.ack(message)
    assert [(one["status"], one["attempts"]) for one in rows(hub, agent.name)] == [("claimed", 1)]


@pytest.mark.requirement("AG-99")
@pytest.mark.parametrize("kind", ["async"])
def test_an_async_block_that_hangs_is_cancelled_and_one_that_is_cancelled_by_others_is_not_lost(hub, joined):
    agent = joined()
    filled(hub, agent.name, 1)

    async def hang(longest_s):
        message = await agent.agent.receive(lease_s=60, wait_s=5, longest_s=longest_s)
        async with message:
            await asyncio.sleep(60)

    begun = time.monotonic()
    with pytest.raises(LeaseLost, match="longer than 1 s"):
        agent.loop.run(hang(1.0))
    assert time.monotonic() - begun < 10

    async def cancelled():
        async with asyncio.timeout(0.5):
            await hang(60.0)

    with pytest.raises(TimeoutError):
        agent.loop.run(cancelled())
    (row,) = rows(hub, agent.name)
    assert (row["status"], row["attempts"], row["last_reason"]) == ("unread", 2, "CancelledError")


@pytest.mark.requirement("AG-08")
@pytest.mark.parametrize(
    "options",
    [{"limit": 0}, {"lease_s": 0}, {"lease_s": 1.5}, {"wait_s": -1}, {"limit": 1001}, {"longest_s": -1}],
)
def test_numbers_that_no_request_can_have_are_refused_before_it(joined, options):
    with pytest.raises(UsageError, match=next(iter(options))):
        next(joined().iterate(**options))


@pytest.mark.requirement("AG-04")
def test_a_token_that_is_not_valid_is_refused(hub, joined):
    agent = joined(credentials=Credentials("x", HubAccess(hub.gateways[0].url, "not-a-token")))
    with pytest.raises(Refused, match="check the token") as failed:
        agent.receive(wait_s=0)
    assert failed.value.reason == "unauthorized" and "not-a-token" not in str(failed.value)
