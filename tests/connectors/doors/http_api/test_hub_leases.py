"""A message that nobody got stays: after a lease that has run out, and for a client that has left."""

from __future__ import annotations

import json
import signal
import time

import httpx
import pytest

from connectors.log.publisher import Publisher
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_RECLAIMED, MailboxLease, MessageAck
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import MESSAGES, one_of

WHO = {"door": "xml", "principal": "pump"}


def sent(hub, name):
    """Put a message into somebody's mailbox; its id."""
    answer = hub.operator.post(MESSAGES, json={"recipient": name, "type": "note", "payload": 1})
    assert answer.status_code == 200, answer.text
    return answer.json()["message_id"]


def row(hub, client, name):
    """The only message of a mailbox, as a gateway shows it."""
    return one_of(client.get(f"/api/hub/mailboxes/default/{name}").json()["messages"])


def attempts(client, name):
    """How often each message of a mailbox was handed out; a gateway may not know of one yet."""
    return [one["attempts"] for one in client.get(f"/api/hub/mailboxes/default/{name}").json()["messages"]]


def append(hub, *records):
    """Append records of the door that leases, one right behind the other."""
    with Publisher(hub.settings) as publisher:
        for append in [publisher.append(record) for record in records]:
            append.result(10)


@pytest.mark.requirement("HH-10")
def test_a_lease_that_runs_out_is_taken_back_and_the_message_is_there_again_at_once(hub):
    name, token = hub.principal("worker")
    message_id = sent(hub, name)
    append(hub, MailboxLease(to=name, request_id="lease-1", lease_ms=400).record(**WHO))
    for client in (hub.operator, hub.other):
        wait_until(lambda client=client: attempts(client, name) == [1], what="leased")
    for client in (hub.operator, hub.other):
        # The gateways do it: nobody asks for the mailbox meanwhile.
        wait_until(lambda client=client: row(hub, client, name)["status"] == "unread", what="taken back")
    taken = [one for one in hub.log() if one.type == MESSAGE_RECLAIMED and message_id in json.dumps(one.body)]
    assert {one.source for one in taken} == {"reactor/reactor"} and len(taken) <= 2
    drained = hub.client(token).get(MESSAGES).json()["messages"]
    assert [message["id"] for message in drained] == [message_id]


@pytest.mark.requirement("HH-10")
def test_what_was_acknowledged_in_time_is_not_taken_back(hub):
    name, _ = hub.principal("worker")
    acknowledged = sent(hub, name)
    lease = MailboxLease(to=name, request_id="lease-1", lease_ms=400).record(**WHO)
    append(hub, lease, MessageAck(to=name, message_id=acknowledged, request_id="lease-1").record(**WHO))
    later, _ = hub.principal("worker")
    sent(hub, later)
    append(hub, MailboxLease(to=later, request_id="lease-1", lease_ms=800).record(**WHO))
    # The later one has been taken back, so the earlier one's turn is over.
    wait_until(lambda: row(hub, hub.operator, later)["status"] == "unread", what="taken back")
    assert row(hub, hub.operator, name)["status"] == "claimed"
    of_first = [one for one in hub.log() if one.type == MESSAGE_RECLAIMED and one.stream.endswith(f"/{name}")]
    assert of_first == []


@pytest.mark.requirement("HH-06")
def test_a_drain_takes_nothing_for_a_client_that_left_while_the_gateway_was_stopped(hub):
    name, token = hub.principal("worker")
    here, there = hub.client(token), hub.client(token, 1)
    behind = hub.gateways[1].program.process
    for _ in range(6):
        behind.send_signal(signal.SIGSTOP)
        try:
            message_id = sent(hub, name)
            with pytest.raises(httpx.ReadTimeout):
                there.get(MESSAGES, timeout=0.2)
        finally:
            behind.send_signal(signal.SIGCONT)
        # Time for the gateway to read the request and the end of its connection, and to settle what it took.
        time.sleep(0.5)
        assert [message["id"] for message in here.get(MESSAGES).json()["messages"]] == [message_id]
