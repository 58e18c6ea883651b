"""Waiting for messages, leases and replies over HTTP at two gateways (DL-01 to DL-05, DL-07)."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import server_events
from tests.connectors.doors.http_api.hub_stack import MESSAGES, one_of, post

WAIT_S = 15


@pytest.fixture
def pool():
    """Threads for requests that wait."""
    with ThreadPoolExecutor(16) as found:
        yield found


def reader(hub):
    """A new principal with a mailbox: its name, and a client of it at each gateway."""
    name, token = hub.principal("worker")
    return name, hub.client(token), hub.client(token, 1)


def sent(client, recipient, payload=None, **fields):
    """Send a message; its id."""
    body = {"recipient": recipient, "type": "note", "payload": payload, **fields}
    answer = client.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["message_id"]


def taken(client, request_id=None, **asked):
    """The answer of a request for messages."""
    headers = {} if request_id is None else {"X-Request-ID": request_id}
    answer = client.get(MESSAGES, params=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(answer):
    """The ids of the messages of an answer, in their order."""
    return [message["id"] for message in answer["messages"]]


def ended(client, how, lease_id, *message_ids, key=None, **fields):
    """The answer to an ack, a nack or an extension: what is done, and reason by id of what is refused."""
    body = {"lease_id": lease_id, "message_ids": message_ids, **fields}
    answer = client.post(
        f"{MESSAGES}/{how}", json=body, headers={} if key is None else {"Idempotency-Key": key}
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    refused = {one["message_id"]: one["reason"] for one in found["refused"]}
    return found["done"], refused, answer.headers.get("Trunkline-Verdict")


def shown(hub, name):
    """The only message of a mailbox, as the operator sees it."""
    return one_of(hub.operator.get(f"/api/hub/mailboxes/default/{name}").json()["messages"])


def unread(client, name):
    """The ids of the messages of a mailbox that are not read, as an operator sees them at one gateway."""
    messages = client.get(f"/api/hub/mailboxes/default/{name}").json()["messages"]
    return [message["message_id"] for message in messages if message["status"] == "unread"]


def wait_until_waiting(*waits: Future[object]) -> None:
    """Give requests the time to begin their wait, and see that none of them has ended."""
    time.sleep(0.5)
    assert not any(wait.done() for wait in waits)


@pytest.mark.requirement("DL-01")
def test_a_request_that_waits_gets_a_message_as_soon_as_it_is_sent_at_either_gateway(hub, pool):
    name, here, there = reader(hub)
    for sender in (hub.operator, hub.other):
        waits = [pool.submit(taken, one, wait=WAIT_S) for one in (here, there)]
        wait_until_waiting(*waits)
        began = time.monotonic()
        first, second = sent(sender, name, 1), None
        wait_until(lambda waits=waits: any(one.done() for one in waits), what="one has got it")
        second = sent(sender, name, 2)
        found = [one for wait in waits for one in ids(wait.result(WAIT_S))]
        assert sorted(found) == sorted([first, second])
        assert time.monotonic() - began < WAIT_S / 2
    assert ids(taken(here)) == []


@pytest.mark.requirement("DL-01")
def test_a_wait_without_a_message_ends_after_its_time_with_an_empty_answer(hub):
    _, here, _ = reader(hub)
    began = time.monotonic()
    assert taken(here, wait=1) == {"messages": [], "left": 0}
    assert 1 <= time.monotonic() - began < 5


def wait_and_leave(client):
    """Ask as a client does, and close the connection while the answer is waited for."""
    url = client.base_url
    question = f"GET {MESSAGES}?wait={WAIT_S} HTTP/1.1\r\nHost: {url.netloc.decode()}\r\n"
    question += f"Authorization: {client.headers['Authorization']}\r\n\r\n"
    with socket.create_connection((url.host, url.port)) as leaving:
        leaving.sendall(question.encode())
        leaving.settimeout(0.5)
        with pytest.raises(TimeoutError):
            leaving.recv(1)


@pytest.mark.requirement("DL-01")
def test_a_client_that_has_gone_during_its_wait_gets_no_message(hub):
    name, here, _ = reader(hub)
    _, other, _ = reader(hub)
    wait_and_leave(other)
    wait_and_leave(here)
    message_id = sent(hub.operator, name)
    assert ids(taken(here, wait=WAIT_S)) == [message_id]


@pytest.mark.requirement("DL-01")
@pytest.mark.parametrize("asked", [{}, {"lease": 30}], ids=["drain", "lease"])
def test_a_wait_ends_at_once_when_its_token_is_revoked(hub, pool, asked):
    name, here, there = reader(hub)
    waits = [pool.submit(one.get, MESSAGES, params={"wait": 60, **asked}) for one in (here, there)]
    question = {"recipient": "operator", "type": "ask"}
    waits.append(pool.submit(here.post, MESSAGES, json=question, params={"wait_reply": 60}))
    wait_until_waiting(*waits)
    assert hub.operator.post(f"/api/hub/principals/{name}/revoke", json={}).status_code == 200
    answers = [wait.result(WAIT_S) for wait in waits]
    assert [(one.status_code, one.json()["reason"]) for one in answers] == [(401, "unauthorized")] * 3


@pytest.mark.requirement("DL-03")
def test_a_leased_message_is_nobody_elses_until_it_is_acknowledged_and_then_it_is_gone(hub):
    name, here, there = reader(hub)
    first, second = sent(hub.operator, name, 1), sent(hub.operator, name, 2)
    lease = taken(here, lease=60, limit=1)
    message = one_of(lease["messages"])
    assert (message["id"], message["attempt"], lease["left"]) == (first, 1, 1)
    left_s = datetime.fromisoformat(message["deadline"]).timestamp() - time.time()
    assert 50 < left_s <= 61
    rest = taken(there)
    assert (ids(rest), rest["left"]) == ([second], 0)
    assert ended(there, "ack", lease["lease_id"], first, "m-none", first) == (
        [first],
        {"m-none": "unknown_stream"},
        "accepted",
    )
    assert ended(here, "ack", lease["lease_id"], first) == ([first], {}, "duplicate")
    assert [
        one["status"] for one in hub.operator.get(f"/api/hub/mailboxes/default/{name}").json()["messages"]
    ] == [
        "claimed",
        "claimed",
    ]


@pytest.mark.requirement("DL-03")
def test_a_message_whose_lease_ran_out_goes_to_the_next_who_waits_and_the_first_can_no_longer_end_it(hub, pool):
    name, here, there = reader(hub)
    message_id = sent(hub.operator, name)
    lost = taken(here, lease=1)
    waits = pool.submit(taken, there, lease=60, wait=WAIT_S)
    began = time.monotonic()
    again = waits.result(WAIT_S)
    assert time.monotonic() - began < 1 + 2
    assert (ids(again), one_of(again["messages"])["attempt"]) == ([message_id], 2)
    for how, fields in (("ack", {}), ("nack", {"reason": "late"}), ("extend", {"lease": 5})):
        assert ended(here, how, lost["lease_id"], message_id, **fields) == (
            [],
            {message_id: "illegal_transition"},
            None,
        )
    assert ended(here, "ack", again["lease_id"], message_id)[0] == [message_id]


@pytest.mark.requirement("DL-03")
def test_an_extended_lease_holds_and_a_message_that_is_given_back_comes_before_newer_ones(hub):
    name, here, there = reader(hub)
    first = sent(hub.operator, name, 1)
    lease = taken(here, lease=1)
    for _ in range(2):
        assert ended(there, "extend", lease["lease_id"], first, lease=60, key=f"{name}-1")[0] == [first]
    second = sent(hub.operator, name, 2)
    time.sleep(1.5)
    assert ids(taken(there, lease=60, limit=1)) == [second]
    assert ended(here, "nack", lease["lease_id"], first, reason="no disk") == ([first], {}, "accepted")
    assert ended(here, "nack", lease["lease_id"], first, reason="no disk") == ([first], {}, "duplicate")
    third = sent(hub.operator, name, 3)
    assert ids(taken(there, lease=60)) == [first, third]


@pytest.mark.requirement("DL-03")
def test_a_request_that_is_repeated_gets_the_same_messages_at_either_gateway(hub):
    name, here, there = reader(hub)
    for asked in ({"lease": 60}, {"wait": 5}, {"lease": 60, "wait": 5}):
        first = sent(hub.operator, name, 1)
        request_id = f"{name}-{len(asked)}-{first}"
        found = taken(here, request_id, limit=10, **asked)
        sent(hub.operator, name, 2)
        assert taken(there, request_id, limit=10, **asked)["messages"] == found["messages"]
        assert ids(found) == [first]
        assert (
            here.get(MESSAGES, params={"limit": 9, **asked}, headers={"X-Request-ID": request_id}).status_code
            == 409
        )
        taken(here)


@pytest.mark.requirement("DL-01")
def test_a_repeated_wait_gets_its_messages_at_once_and_a_new_one_waits_for_its_own(hub, pool):
    name, here, there = reader(hub)
    message_id = sent(hub.operator, name)
    assert ids(taken(here, f"{name}-1", wait=WAIT_S)) == [message_id]
    began = time.monotonic()
    assert ids(taken(there, f"{name}-1", wait=WAIT_S)) == [message_id]
    assert time.monotonic() - began < WAIT_S / 2
    waits = pool.submit(taken, there, f"{name}-2", wait=WAIT_S)
    wait_until_waiting(waits)
    later = sent(hub.operator, name)
    assert ids(waits.result(WAIT_S)) == [later]
    assert taken(here, f"{name}-3", wait=0.3)["messages"] == []


@pytest.mark.requirement("DL-04")
def test_consumers_of_one_mailbox_each_get_different_messages(hub, pool):
    name, token = hub.principal("worker")
    clients = [hub.client(token, number % 2) for number in range(6)]
    done = threading.Event()

    def work(client):
        found = []
        while not done.is_set():
            lease = taken(client, lease=60, limit=3, wait=1)
            if lease["messages"]:
                found += ended(client, "ack", lease["lease_id"], *ids(lease))[0]
        return found

    works = [pool.submit(work, client) for client in clients]
    posted = [sent((hub.operator, hub.other)[number % 2], name, number) for number in range(90)]
    time.sleep(1)
    done.set()
    found = [one for work in works for one in work.result(WAIT_S)]
    assert sorted(found) == sorted(posted)
    assert sum(bool(work.result()) for work in works) > 1


@pytest.mark.requirement("DL-05")
def test_a_message_is_dead_after_its_last_attempt_and_shows_why(hub):
    name, here, there = reader(hub)
    message_id = sent(hub.operator, name)
    most = hub.settings.gateway.max_attempts
    for attempt in range(1, most + 1):
        lease = taken((here, there)[attempt % 2], lease=60, wait=5)
        assert one_of(lease["messages"])["attempt"] == attempt
        assert ended(here, "nack", lease["lease_id"], message_id, reason=f"no disk {attempt}")[0] == [
            message_id
        ]
    found = shown(hub, name)
    assert (found["status"], found["attempts"], found["last_reason"]) == ("dead", most, f"no disk {most}")
    assert ids(taken(here)) == []


@pytest.mark.requirement("DL-07")
@pytest.mark.requirement("DL-06")
def test_an_asker_gets_the_reply_to_its_message_and_nothing_else(hub, pool):
    asked, here, there = reader(hub)
    asker, mine, _ = reader(hub)
    body = {"recipient": asked, "type": "ask", "payload": "6 * 7?", "thread": "sums"}
    headers = {"Idempotency-Key": f"{asker}-1"}

    def ask():
        return mine.post(MESSAGES, json=body, params={"wait_reply": WAIT_S}, headers=headers)

    wait = pool.submit(ask)
    question = one_of(taken(there, wait=WAIT_S)["messages"])
    assert (question["sender"], question["thread"]) == (asker, "sums")
    other = sent(here, asker, "hello")
    sent(hub.operator, asker, "to another", in_reply_to="m-1")
    # Somebody else knows the question's id.
    sent(hub.operator, asker, "43", in_reply_to=question["id"])
    fields = {"in_reply_to": question["id"], "thread": question["thread"]}
    reply_id = sent(there, asker, 42, **fields)
    for answer in (wait.result(WAIT_S), ask()):
        assert answer.status_code == 200, answer.text
        assert answer.json()["message_id"] == question["id"]
        reply = answer.json()["reply"]
        assert {"id": reply_id, "sender": asked, "payload": 42, **fields}.items() <= reply.items()
    left = taken(mine)["messages"]
    assert left[0]["id"] == other
    assert [one.get("in_reply_to") for one in left] == [None, "m-1", question["id"]]


@pytest.mark.requirement("DL-07")
def test_without_a_reply_in_time_the_asker_gets_202_and_the_reply_is_in_its_mailbox_later(hub):
    asked, here, _ = reader(hub)
    asker, mine, _ = reader(hub)
    answer = mine.post(MESSAGES, json={"recipient": asked, "type": "ask"}, params={"wait_reply": 1})
    assert answer.status_code == 202, answer.text
    message_id = answer.json()["message_id"]
    assert answer.json() == {"delivered": True, "message_id": message_id}
    reply_id = sent(here, asker, "at last", in_reply_to=message_id)
    found = one_of(taken(mine)["messages"])
    assert (found["id"], found["in_reply_to"]) == (reply_id, message_id)


def followed(client, count, last_event_id=None):
    """The next events of a mailbox's stream."""
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    with client.stream("GET", f"{MESSAGES}/events", headers=headers) as answer:
        assert answer.status_code == 200
        events = server_events(answer)
        return [next(events) for _ in range(count)]


@pytest.mark.requirement("DL-02")
def test_a_mailboxs_stream_goes_on_at_another_gateway_without_a_gap_and_takes_nothing(hub, pool):
    name, here, there = reader(hub)
    posted = [sent((hub.operator, hub.other)[number % 2], name, number) for number in range(4)]
    first = followed(here, 2)
    assert [event.data["id"] for event in first] == posted[:2]
    following = pool.submit(followed, there, 4, first[-1].id)
    wait_until_waiting(following)
    posted += [sent(hub.operator, name, number) for number in range(4, 6)]
    rest = following.result(WAIT_S)
    assert [event.data["id"] for event in rest] == posted[2:]
    assert {event.name for event in rest} == {"message"}
    read = here.post(f"{MESSAGES}/read", json={"message_ids": posted[:3]})
    assert read.status_code == 200, read.text
    # The other gateway knows of it when it has read the record.
    wait_until(lambda: unread(hub.other, name) == posted[3:], what="the marks at the other gateway")
    assert [event.data["id"] for event in followed(there, 3)] == posted[3:]
    assert ids(taken(here)) == posted[3:]


@pytest.mark.requirement("DL-03")
def test_nobody_ends_a_lease_of_another_principal_or_in_another_mailbox(hub):
    name, here, _ = reader(hub)
    _, stranger, _ = reader(hub)
    message_id = sent(hub.operator, name)
    lease = taken(here, lease=60)
    for client in (stranger, hub.operator):
        for how, fields in (("ack", {}), ("nack", {}), ("extend", {"lease": 5})):
            found = ended(client, how, lease["lease_id"], message_id, **fields)
            assert found == ([], {message_id: "unknown_stream"}, None)
    assert post(hub.client(""), name).status_code == 401
    assert ended(here, "ack", lease["lease_id"], message_id)[0] == [message_id]
