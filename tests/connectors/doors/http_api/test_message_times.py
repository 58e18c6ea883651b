"""Messages that expire or wait, at two gateways whose timers append what the clock brings (DL-21, DL-22)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_DUE, MESSAGE_EXPIRED
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import MESSAGES, one_of

# A message ends at most so long after its time, on a healthy stack.
IN_TIME_S = 2.0


def sent(client, recipient, **fields):
    """Send a message; the answer's body."""
    answer = client.post(MESSAGES, json={"recipient": recipient, "type": "note", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def row(client, name):
    """The only message of a mailbox, as a gateway shows it; None: the gateway does not know it yet."""
    found = client.get(f"/api/hub/mailboxes/default/{name}").json()["messages"]
    return one_of(found) if found else None


def status(client, name):
    """The status of the only message of a mailbox."""
    found = row(client, name)
    return None if found is None else found["status"]


def moment(text):
    """A time of an answer in seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()


def records(hub, record_type, name):
    """The records of a type about the mailbox of this name."""
    return [one for one in hub.log() if one.type == record_type and one.stream.endswith(f"/{name}")]


@pytest.mark.requirement("DL-21")
def test_a_message_that_nobody_takes_ends_as_expired_soon_after_its_time_and_leaves_the_count(hub):
    name, token = hub.principal("worker")
    assert sent(hub.operator, name, expires_in_s=1.0)["delivered"] is True
    for client in (hub.operator, hub.other):
        # The timers do it: nobody asks for the mailbox meanwhile.
        wait_until(lambda client=client: status(client, name) == "expired", 10, "expired")
    found = row(hub.operator, name)
    assert moment(found["expires_at"]) - moment(found["posted_at"]) == pytest.approx(1.0, abs=0.002)
    assert 0 <= moment(found["ended_at"]) - moment(found["expires_at"]) < IN_TIME_S
    assert hub.client(token).get(MESSAGES).json() == {"messages": [], "left": 0}
    taken = records(hub, MESSAGE_EXPIRED, name)
    assert {one.source for one in taken} == {"reactor/reactor"} and len(taken) <= 2


@pytest.mark.requirement("DL-21")
def test_a_message_that_is_taken_in_time_does_not_expire(hub):
    name, token = hub.principal("worker")
    message_id = sent(hub.operator, name, expires_in_s=1.0)["message_id"]
    assert [one["id"] for one in hub.client(token).get(MESSAGES).json()["messages"]] == [message_id]
    later, _ = hub.principal("worker")
    sent(hub.operator, later, expires_in_s=1.0)
    wait_until(lambda: status(hub.operator, later) == "expired", 10, "the later one has expired")
    assert status(hub.operator, name) == "claimed" and records(hub, MESSAGE_EXPIRED, name) == []


@pytest.mark.requirement("DL-21")
def test_the_lease_of_a_message_outlasts_its_expiry_and_the_message_ends_when_it_is_given_back(hub):
    name, token = hub.principal("worker")
    message_id = sent(hub.operator, name, expires_in_s=1.0)["message_id"]
    mine = hub.client(token)
    lease_id = mine.get(MESSAGES, params={"lease": 60}).json()["lease_id"]
    time.sleep(2.0)
    assert status(hub.operator, name) == "leased"
    back = mine.post(f"{MESSAGES}/nack", json={"lease_id": lease_id, "message_ids": [message_id]})
    assert back.json()["done"] == [message_id]
    wait_until(lambda: status(hub.operator, name) == "expired", IN_TIME_S + 1, "expired after the lease")


@pytest.mark.requirement("DL-43")
def test_a_count_has_what_waits_by_priority_and_not_what_is_leased_delayed_or_expired(hub):
    name, token = hub.principal("worker")
    mine = hub.client(token)

    def counted():
        answer = mine.get(f"{MESSAGES}/count")
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert counted() == {"high": 0, "normal": 0, "low": 0, "total": 0}
    for priority in ("high", "high", "normal", "normal", "normal", "low"):
        sent(hub.operator, name, priority=priority)
    sent(hub.operator, name, deliver_after_s=600)
    sent(hub.operator, name, priority="low", expires_in_s=0.001)
    assert counted() == {"high": 2, "normal": 3, "low": 1, "total": 6}
    leased = mine.get(MESSAGES, params={"lease": 2, "limit": 3}).json()
    assert counted() == {"high": 0, "normal": 2, "low": 1, "total": 3}
    mine.post(
        f"{MESSAGES}/ack", json={"lease_id": leased["lease_id"], "message_ids": [leased["messages"][0]["id"]]}
    )
    wait_until(lambda: counted()["total"] == 5, 10, "the lease has ended")
    assert counted() == {"high": 1, "normal": 3, "low": 1, "total": 5}
    # Nobody counts the messages of others: there is no name to give.
    other = hub.client(hub.principal("worker")[1])
    assert other.get(f"{MESSAGES}/count", params={"name": name}).json()["total"] == 0


@pytest.mark.requirement("DL-22")
def test_a_delayed_message_is_seen_by_nobody_before_its_time_and_once_after_it(hub):
    name, token = hub.principal("worker")
    answer = sent(hub.operator, name, deliver_after_s=2.0, expires_in_s=60, priority="high")
    assert answer["delivered"] is False
    here, there = hub.client(token), hub.client(token, 1)
    for client in (here, there):
        assert client.get(MESSAGES).json() == {"messages": [], "left": 0}
    wait_until(lambda: status(hub.other, name) == "delayed", 10, "the other gateway knows it")
    waited = there.get(MESSAGES, params={"wait": 30}, timeout=60).json()["messages"]
    assert [one["id"] for one in waited] == [answer["message_id"]]
    found = row(hub.other, name)  # the gateway that has handed it out
    assert 0 <= moment(found["posted_at"]) - moment(found["deliver_at"]) < IN_TIME_S
    assert moment(found["handed_at"]) >= moment(found["deliver_at"])
    assert here.get(MESSAGES).json()["messages"] == []
    assert len(records(hub, MESSAGE_DUE, name)) <= 2


@pytest.mark.requirement("DL-22")
def test_the_operator_clears_delayed_messages_too_and_they_are_never_delivered(hub):
    name, token = hub.principal("worker")
    sent(hub.operator, name, deliver_after_s=1.0)
    assert hub.operator.post(f"/api/hub/mailboxes/default/{name}/clear").json() == {"cleared": 1}
    later, _ = hub.principal("worker")
    sent(hub.operator, later, deliver_after_s=1.0)
    wait_until(lambda: status(hub.operator, later) == "unread", 10, "the later one is there")
    assert status(hub.operator, name) == "cleared"
    assert hub.client(token).get(MESSAGES).json()["messages"] == []


@pytest.mark.requirement("DL-21")
@pytest.mark.requirement("DL-22")
def test_timers_survive_a_restart_of_all_gateways(hub):
    name, token = hub.principal("worker")
    gone, _ = hub.principal("worker")
    message_id = sent(hub.operator, name, deliver_after_s=3.0)["message_id"]
    sent(hub.operator, gone, expires_in_s=3.0)
    for gateway in hub.gateways:
        gateway.program.kill()
    hub.start()
    waited = hub.client(token).get(MESSAGES, params={"wait": 30}, timeout=60).json()["messages"]
    assert [one["id"] for one in waited] == [message_id]
    wait_until(lambda: status(hub.operator, gone) == "expired", 10, "expired after the restart")


@pytest.mark.requirement("DL-22")
def test_more_messages_than_the_log_takes_at_once_may_have_one_time(hub):
    name, token = hub.principal("worker")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: sent(hub.operator, name, deliver_after_s=4.0), range(1200)))
    wanted, mine, got = {one["message_id"] for one in answers}, hub.client(token), []
    while len(got) < len(wanted):
        found = mine.get(MESSAGES, params={"limit": 1000, "wait": 20}, timeout=60).json()["messages"]
        assert found, f"{len(got)} of {len(wanted)} messages came"
        got += [one["id"] for one in found]
    assert set(got) == wanted and len(got) == len(wanted)
