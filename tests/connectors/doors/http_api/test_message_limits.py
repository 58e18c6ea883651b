"""The limits of mailboxes and of principals at two gateways (LM-01, LM-02)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from schemas.streams.mailboxes.message import MESSAGE_POSTED
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import MESSAGES, said

LIMITS, JOBS = "/api/hub/limits", "/api/hub/jobs"


def limited(hub, scope, name, **limits):
    """Set limits, and wait until both gateways have them."""
    answer = hub.operator.post(f"{LIMITS}/{scope}/{name}", json=limits)
    assert answer.status_code == 200, answer.text

    def known():
        rows = hub.other.get(LIMITS).json()["limits"]
        return answer.json() in rows

    wait_until(known, what="the other gateway has the limits")


def send(client, recipient, payload=1, **headers):
    """Send a message; the answer."""
    body = {"recipient": recipient, "type": "note", "payload": payload}
    return client.post(MESSAGES, json=body, headers=headers)


def postings(hub, name):
    """The number of records that post to a mailbox, whatever their verdict."""
    return sum(one.type == MESSAGE_POSTED and one.stream.endswith(f"/{name}") for one in hub.log())


@pytest.mark.requirement("LM-01")
def test_two_gateways_together_do_not_pass_the_limit_of_a_mailbox(hub):
    name, token = hub.principal("worker")
    limited(hub, "name", name, pending_most=20)
    clients = (hub.operator, hub.other)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: send(clients[number % 2], name, number), range(80)))
    assert sorted({one.status_code for one in answers}) == [200, 429]
    assert sum(one.status_code == 200 for one in answers) == 20
    refused = next(one for one in answers if one.status_code == 429)
    assert said(refused) == (429, "mailbox_full") and int(refused.headers["Retry-After"]) >= 1
    mine = hub.client(token)
    assert len(mine.get(MESSAGES).json()["messages"]) == 20
    wait_until(lambda: send(hub.operator, name).status_code == 200, 10, "there is room again")


@pytest.mark.requirement("LM-01")
@pytest.mark.requirement("LM-09")
def test_a_flood_on_a_full_mailbox_leaves_few_records(hub):
    name, _ = hub.principal("worker")
    flooding, token = hub.principal("worker")
    limited(hub, "name", name, bytes_most=30)
    mine = hub.client(token)
    assert send(mine, name, "x" * 28).status_code == 200
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: send(mine, name, "more"), range(80)))
    assert {said(one) for one in answers} == {(429, "mailbox_full")}
    # Each second there are as many as are under way at once. Refusals: five, and one in ten seconds.
    took_s = time.monotonic() - began
    assert took_s > 2  # twenty are answered at once, and then twenty in a second
    assert postings(hub, name) <= 1 + 4 * (2 + took_s)
    assert (
        1 <= len([one for one in hub.refusals(flooding) if one["reason"] == "mailbox_full"]) <= 6 + took_s / 10
    )


@pytest.mark.requirement("LM-01")
def test_a_repeated_request_whose_message_is_there_is_no_second_one_in_a_full_mailbox(hub):
    name, _ = hub.principal("worker")
    limited(hub, "name", name, pending_most=1)
    first, again = (send(hub.operator, name, **{"Idempotency-Key": name}) for _ in "12")
    assert first.status_code == again.status_code == 200 and first.json() == again.json()
    assert said(send(hub.operator, name)) == (429, "mailbox_full")


@pytest.mark.requirement("LM-02")
def test_a_principal_sends_so_many_messages_and_bytes_a_minute_and_the_others_are_not_held_up(hub):
    name, token = hub.principal("worker")
    _, others = hub.principal("worker")
    limited(hub, "name", name, messages_per_minute=5)
    mine = hub.client(token)
    answers = [send(mine, "operator") for _ in range(8)]
    assert [one.status_code for one in answers] == [200] * 5 + [429] * 3
    assert said(answers[-1]) == (429, "rate_limited") and 1 <= int(answers[-1].headers["Retry-After"]) <= 12
    assert send(hub.client(others), "operator").status_code == 200
    limited(hub, "name", name, bytes_per_minute=100)
    assert said(send(mine, "operator", "x" * 99)) == (429, "rate_limited")
    assert send(mine, "operator", "x" * 9).status_code == 200
    limited(hub, "name", name)
    assert send(mine, "operator", "x" * 999).status_code == 200


@pytest.mark.requirement("LM-02")
def test_a_message_to_a_topic_counts_once_and_a_broadcast_for_each_recipient(hub):
    name, token = hub.principal("worker")
    topic = f"/api/hub/topics/of-{name}"
    assert hub.operator.post(f"{topic}/subscribe", json={}).status_code == 200
    limited(hub, "name", name, messages_per_minute=2)
    mine = hub.client(token)
    answers = [mine.post(topic, json={"type": "news"}) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert said(answers[-1]) == (429, "rate_limited")
    assert said(mine.post(f"{MESSAGES}/broadcast", json={"type": "news"})) == (429, "rate_limited")


@pytest.mark.requirement("LM-02")
def test_a_limit_of_the_name_counts_before_that_of_the_role_and_this_before_that_for_all(hub):
    name, _ = hub.principal("viewer")
    other, _ = hub.principal("viewer")
    limited(hub, "all", "all", pending_most=50_000)
    limited(hub, "role", "viewer", pending_most=1)
    limited(hub, "name", name, pending_most=2)
    assert [send(hub.operator, name).status_code for _ in range(3)] == [200, 200, 429]
    assert [send(hub.operator, other).status_code for _ in range(2)] == [200, 429]
    limited(hub, "role", "viewer")
    assert send(hub.operator, other).status_code == 200


@pytest.mark.requirement("LM-04")
def test_jobs_and_subscriptions_are_limited_at_each_gateway_and_few_refusals_are_recorded(hub):
    name, token = hub.principal("delegator")
    limited(hub, "role", "delegator", live_jobs_most=2, subscriptions_most=1)
    mine, there = hub.client(token), hub.client(token, gateway=-1)
    jobs = [mine.post(JOBS, json={"description": "build"}) for _ in range(20)]
    assert [one.status_code for one in jobs] == [201] * 2 + [429] * 18
    assert said(jobs[-1]) == (429, "limit_reached") and int(jobs[-1].headers["Retry-After"]) >= 1
    full = (429, "limit_reached")
    wait_until(lambda: said(there.post(JOBS, json={"description": "build"})) == full, what="both know")
    job_id = jobs[0].json()["job_id"]
    assert mine.post(f"{JOBS}/{job_id}/cancel", json={}).status_code == 200
    assert mine.post(JOBS, json={"description": "build"}).status_code == 201
    topic = f"/api/hub/topics/{name}"
    assert mine.post(f"{topic}-a/subscribe", json={}).status_code == 200
    assert said(mine.post(f"{topic}-b/subscribe", json={})) == full
    refusals = [one for one in hub.refusals(name) if one["reason"] == "limit_reached"]
    assert 3 <= len(refusals) <= 13, "five for each route and gateway, and one in ten seconds"
    limited(hub, "role", "delegator")
    assert mine.post(f"{topic}-b/subscribe", json={}).status_code == 200
    assert mine.post(JOBS, json={"description": "build"}).status_code == 201
