"""Dead messages at two gateways: they are listed with their reason, and replayed once per request (DL-10)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from connectors.log.publisher import Publisher
from schemas.streams.mailboxes.mailbox_bodies import MailboxLease
from schemas.streams.mailboxes.message import Message
from schemas.streams.task.task_registry import TASK_COMPLETED
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import AUDIT, MESSAGES, one_of

DEAD = f"{MESSAGES}/dead"


def mailbox(name, realm="default"):
    return f"/api/hub/mailboxes/{realm}/{name}"


def replay(client, name, message_id, key=None, realm="default"):
    """The answer of a request to replay a message."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"{mailbox(name, realm)}/messages/{message_id}/replay", headers=headers)


def reader(hub, role="worker"):
    """A new principal: its name, and a client of it at each gateway."""
    name, token = hub.principal(role)
    return name, hub.client(token), hub.client(token, 1)


def dead(hub, client, name, sender=None, reason="no disk", **fields):
    """Send a message and let it die; its id."""
    body = {"recipient": name, "type": "note", "payload": {"n": 1}, **fields}
    answer = (sender or hub.operator).post(MESSAGES, json=body)
    message_id = answer.json()["message_id"]
    for _ in range(hub.settings.gateway.max_attempts):
        lease = client.get(MESSAGES, params={"lease": 60, "wait": 5}).json()
        named = {"lease_id": lease["lease_id"], "message_ids": [message_id], "reason": reason}
        assert client.post(f"{MESSAGES}/nack", json=named).json()["done"] == [message_id]
    return message_id


def shown(client, name, **asked):
    """The messages of a mailbox."""
    answer = client.get(mailbox(name), params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["messages"]


def said(answer):
    return answer.status_code, answer.json()["reason"]


@pytest.mark.requirement("DL-10")
def test_dead_messages_are_listed_with_attempts_and_reason_in_their_mailbox_and_over_all(hub):
    name, here, _ = reader(hub)
    gone = [dead(hub, here, name, reason=f"no disk {n}") for n in range(2)]
    waits = hub.operator.post(MESSAGES, json={"recipient": name, "type": "note"}).json()["message_id"]
    held = one_of(here.get(MESSAGES, params={"lease": 60}).json()["messages"])["id"]
    assert held == waits
    for client in (here, hub.operator, hub.other):
        found = shown(client, name, status="dead")
        assert [(one["message_id"], one["last_reason"]) for one in found] == [
            (gone[0], "no disk 0"),
            (gone[1], "no disk 1"),
        ]
        assert {one["attempts"] for one in found} == {hub.settings.gateway.max_attempts}
        assert {json.loads(one["body"])["n"] for one in found} == {1}
        assert [one["message_id"] for one in shown(client, name, status="dead", limit=1)] == gone[1:]
        leased = one_of(shown(client, name, status="leased"))
        assert (leased["message_id"], leased["handed_to"], leased["attempts"]) == (held, f"http/{name}", 1)
        assert leased["lease_until"] is not None
    for client in (hub.operator, hub.other):
        page = client.get(DEAD, params={"limit": 2}).json()
        assert [one["message_id"] for one in page["messages"]] == gone
        assert page["total"] >= 2
    assert said(here.get(DEAD)) == (403, "policy")
    for asked in ({"status": "gone"}, {"status": ""}, {"limit": 0}, {"limit": 1001}):
        assert said(hub.operator.get(mailbox(name), params=asked)) == (400, "malformed")
    for asked in ({"limit": 0}, {"limit": 1001}, {"mailbox": name}):
        assert said(hub.operator.get(DEAD, params=asked)) == (400, "malformed")


@pytest.mark.requirement("DL-10")
def test_a_replay_is_a_new_message_of_the_same_content_that_names_the_dead_one(hub):
    name, here, there = reader(hub)
    asker, mine, _ = reader(hub)
    message_id = dead(hub, here, name, mine, type="ask", payload={"q": [1]}, in_reply_to="m-0", thread="t-0")
    answer = replay(there, name, message_id)
    assert answer.status_code == 200, answer.text
    new_id = answer.json()["message_id"]
    assert answer.json() == {"replayed": True, "message_id": new_id}
    assert new_id != message_id
    message = one_of(here.get(MESSAGES, params={"wait": 5}).json()["messages"])
    expected = {
        "id": new_id,
        "sender": asker,
        "type": "ask",
        "payload": {"q": [1]},
        "in_reply_to": "m-0",
        "thread": "t-0",
        "replay_of": message_id,
    }
    assert expected.items() <= message.items()
    old, new = shown(hub.operator, name)
    assert (old["status"], old["attempts"], old["replay_of"]) == ("dead", 5, None)
    assert (new["status"], new["attempts"], new["replay_of"]) == ("claimed", 1, message_id)
    same = ("sender", "from_verified", "kind", "body", "priority", "thread", "in_reply_to", "sent_at")
    assert [new[field] for field in same] == [old[field] for field in same]
    # An auditor sees who replayed it: the door and the principal of the record.
    record = one_of(
        [one for one in hub.log() if one.type == "message.posted" and one.body["message_id"] == new_id]
    )
    assert (record.source, record.body["from"]) == (f"http/{name}", asker)
    entry = one_of(
        [
            one
            for one in hub.operator.get(AUDIT, params={"limit": 20}).json()["entries"]
            if one["message_id"] == new_id
        ]
    )
    assert (entry["verdict"], entry["sender"]) == ("delivered", asker)
    assert entry["why"] == f"replay of {message_id} by http/{name}"


@pytest.mark.requirement("DL-10")
def test_a_double_click_replays_once_and_each_new_key_once_more(hub):
    name, here, there = reader(hub)
    message_id = dead(hub, here, name)
    with ThreadPoolExecutor(6) as pool:
        clients = (here, there, hub.operator, hub.other, here, there)
        answers = list(pool.map(lambda one: replay(one, name, message_id), clients))
    assert {one.status_code for one in answers} == {200}
    first = one_of({one.json()["message_id"] for one in answers})
    assert sorted(one.headers["Trunkline-Verdict"] for one in answers) == ["accepted", *["duplicate"] * 5]
    # A repeated request changes nothing when the replay was taken, too.
    assert one_of(here.get(MESSAGES).json()["messages"])["id"] == first
    assert replay(there, name, message_id).json()["message_id"] == first
    assert here.get(MESSAGES).json()["messages"] == []
    keyed = {key: [replay(one, name, message_id, key) for one in (here, there)] for key in ("k1", "k2")}
    ids = {key: one_of({one.json()["message_id"] for one in found}) for key, found in keyed.items()}
    assert len({first, *ids.values()}) == 3
    found = here.get(MESSAGES).json()["messages"]
    assert sorted(one["id"] for one in found) == sorted(ids.values())
    assert {one["replay_of"] for one in found} == {message_id}


@pytest.mark.requirement("DL-10")
def test_a_replay_that_dies_is_replayed_on_its_own(hub):
    name, here, _ = reader(hub)
    message_id = dead(hub, here, name)
    first = replay(here, name, message_id).json()["message_id"]
    for _ in range(hub.settings.gateway.max_attempts):
        lease = here.get(MESSAGES, params={"lease": 60, "wait": 5}).json()
        here.post(f"{MESSAGES}/nack", json={"lease_id": lease["lease_id"], "message_ids": [first]})
    second = replay(here, name, first).json()["message_id"]
    message = one_of(here.get(MESSAGES, params={"wait": 5}).json()["messages"])
    assert (message["id"], message["replay_of"]) == (second, first)


@pytest.mark.requirement("DL-10")
def test_only_a_dead_message_is_replayed_and_only_by_its_owner_or_the_operator(hub):
    name, here, _ = reader(hub)
    message_id = dead(hub, here, name)
    # The owner of a name owns no mailbox of this name in another realm.
    assert said(replay(here, name, message_id, realm="file")) == (403, "policy")
    for address in ((name, "m-none"), ("nobody", message_id)):
        assert replay(hub.operator, *address).status_code == 404
    waits = hub.operator.post(MESSAGES, json={"recipient": name, "type": "note"}).json()["message_id"]
    assert said(replay(here, name, waits)) == (409, "illegal_transition")
    assert here.get(MESSAGES).json()["messages"][0]["id"] == waits
    assert said(replay(here, name, waits)) == (409, "illegal_transition")
    assert [one["status"] for one in shown(here, name)] == ["dead", "claimed"]


@pytest.mark.requirement("DL-10")
def test_a_sender_cannot_claim_that_its_message_is_a_replay(hub):
    name, here, _ = reader(hub)
    body = {"recipient": name, "type": "note", "replay_of": "m-1"}
    assert said(here.post(MESSAGES, json=body)) == (400, "malformed")
    assert said(here.post(f"{MESSAGES}/broadcast", json={**body, "recipient": None})) == (400, "malformed")
    assert shown(here, name) == []


def posted_dead(hub, **fields):
    """Append a message of a door that leaves the sender unverified, and let it die in its mailbox; its id."""
    message = Message.model_validate({"kind": "note", "body": "late", **fields})
    with Publisher(hub.settings) as publisher:
        publisher.append(message.record(door="file", principal="bridge")).result()
        for number in range(2):
            lease = MailboxLease(
                realm=message.realm,
                to=message.recipient,
                request_id=f"{message.message_id}-{number}",
                limit=10,
                lease_ms=1,
                attempts_most=1,
            ).record(door="file", principal="bridge")
            publisher.append(lease).result()
    address = mailbox(message.recipient, message.realm)
    for client in (hub.operator, hub.other):
        wait_until(
            lambda client=client: [one["status"] for one in client.get(address).json()["messages"]] == ["dead"],
            what="the message is dead",
        )
    return message.message_id


@pytest.mark.requirement("DL-10")
def test_a_replay_keeps_an_unverified_sender_unverified(hub):
    message_id = posted_dead(hub, **{"message_id": "m-u", "realm": "file", "from": "ann", "to": "unverified"})
    new_id = replay(hub.operator, "unverified", message_id, realm="file").json()["message_id"]
    new = hub.operator.get(mailbox("unverified", "file")).json()["messages"][-1]
    assert (new["message_id"], new["sender"], new["from_verified"]) == (new_id, "ann", False)


@pytest.mark.requirement("DL-10")
def test_a_dead_message_that_has_expired_is_not_replayed(hub):
    soon = (datetime.now(UTC) + timedelta(seconds=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = {"message_id": "m-x", "realm": "file", "from": "ann", "to": "expiring", "expires_at": soon}
    message_id = posted_dead(hub, **fields)
    first = replay(hub.operator, "expiring", message_id, realm="file")
    assert first.status_code == 200, first.text
    wait_until(
        lambda: (
            said(replay(hub.operator, "expiring", message_id, "later", realm="file"))
            if datetime.now(UTC) > datetime.fromisoformat(soon)
            else None
        ),
        what="the message has expired",
    )
    assert said(replay(hub.operator, "expiring", message_id, "later", realm="file")) == (
        409,
        "illegal_transition",
    )
    # A request that was made in time may still be repeated.
    assert replay(hub.other, "expiring", message_id, realm="file").json() == first.json()


@pytest.mark.requirement("DL-10")
def test_the_replay_of_a_message_about_a_tasks_end_ends_no_task(hub):
    task = hub.submit("idle")
    agent = hub.client(task.token)
    payload = {"event": TASK_COMPLETED, "result": "done"}
    name, here, _ = reader(hub)
    message_id = dead(hub, here, name, agent, payload=payload)
    hub.wait_task(task.id, "completed")
    new_id = replay(here, name, message_id).json()["message_id"]
    wait_until(lambda: here.get(MESSAGES).json()["messages"], what="the replay is there")
    ends = [one for one in hub.log() if one.type == TASK_COMPLETED and one.body.get("task_id") == task.id]
    assert len(ends) == 1, (new_id, ends)
