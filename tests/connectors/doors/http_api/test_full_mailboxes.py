"""Records of the system itself for a mailbox that is full: taken, or counted as refused (ST-80 to ST-82)."""

from __future__ import annotations

import uuid

import pytest

from schemas.streams.mailboxes.message import MESSAGE_POSTED
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import MESSAGES
from tests.connectors.doors.http_api.test_message_limits import JOBS, limited, send

TOPICS, SCHEDULES, WEBHOOKS = "/api/hub/topics", "/api/hub/schedules", "/api/hub/webhooks"


def full_mailbox(hub, role="worker", most=1):
    """A principal whose own limit leaves room for one message, which waits there; its name and its client."""
    name, token = hub.principal(role)
    limited(hub, "name", name, pending_most=most)
    assert send(hub.operator, name, "first").status_code == 200
    return name, hub.client(token)


def drained(client, least, timeout_s=15):
    """Drain a mailbox until it had so many messages."""
    found = []

    def enough():
        found.extend(client.get(MESSAGES).json()["messages"])
        return len(found) >= least

    wait_until(enough, timeout_s, f"{least} messages")
    return found


@pytest.mark.requirement("ST-80")
def test_the_end_of_a_job_comes_into_a_mailbox_that_is_full_by_its_own_limit(hub):
    _, delegator = full_mailbox(hub, "delegator")
    job = delegator.post(JOBS, json={"description": "some work"})
    assert job.status_code in (200, 201), job.text
    job_id = job.json()["job_id"]
    assert hub.operator.post(f"{JOBS}/{job_id}/cancel", json={}).status_code in (200, 202)

    def is_posted():
        return any(one.type == MESSAGE_POSTED and one.body["kind"] == "job.cancelled" for one in hub.log())

    # The first message still waits, so that there is no room when the end is posted.
    wait_until(is_posted, what="the message about the job's end")
    assert [one["type"] for one in drained(delegator, 2)] == ["note", "job.cancelled"]


@pytest.mark.requirement("ST-81")
def test_a_copy_that_a_full_mailbox_refuses_is_counted_as_full_and_not_as_delivered(hub):
    full, client = full_mailbox(hub)
    other, token = hub.principal("worker")
    topic = f"news-{uuid.uuid4().hex[:8]}"
    for name in (full, other):
        answer = hub.operator.post(f"{TOPICS}/{topic}/subscribe", json={"subscriber": name})
        assert answer.status_code in (200, 201), answer.text
    published = hub.operator.post(f"{TOPICS}/{topic}", json={"type": "note", "payload": "news"})
    assert published.status_code == 200, published.text
    assert (published.json()["recipients"], published.json()["full"]) == (1, 1)
    delivered = [one.body for one in hub.log() if one.type == "topic.delivered" and one.body["topic"] == topic]
    assert [(one["refused_count"], one["refused"]) for one in delivered] == [(1, [full])]
    assert [one["payload"] for one in drained(client, 1)] == ["first"]
    assert [one["payload"] for one in drained(hub.client(token), 1)] == ["news"]
    again = hub.operator.post(f"{TOPICS}/{topic}", json={"type": "note", "payload": "more"})
    assert (again.json()["recipients"], again.json()["full"]) == (2, 0)


@pytest.mark.requirement("ST-82")
def test_runs_counts_the_posted_messages_of_a_schedule_and_missed_runs_those_that_were_refused(hub):
    name, token = hub.principal("worker")
    limited(hub, "name", name, pending_most=2)
    schedule = f"tea-{uuid.uuid4().hex[:8]}"
    body = {"every_s": 1, "recipient": name, "type": "note", "payload": 1}
    assert hub.operator.post(f"{SCHEDULES}/{schedule}", json=body).status_code in (200, 201)

    def row():
        return hub.operator.get(f"{SCHEDULES}/{schedule}").json()

    wait_until(lambda: row()["missed_runs"] >= 2, 20, "refused runs")
    assert row()["runs"] == 2
    assert row()["refused_reason"] == "mailbox_full"
    assert len(hub.client(token).get(MESSAGES).json()["messages"]) == 2
    wait_until(lambda: row()["runs"] >= 3, 20, "there is room again")
    hub.operator.delete(f"{SCHEDULES}/{schedule}")


@pytest.mark.requirement("ST-83")
def test_a_message_that_is_published_right_after_a_webhook_is_set_goes_to_it(hub):
    for _ in range(3):
        name, topic = f"hook-{uuid.uuid4().hex[:8]}", f"news-{uuid.uuid4().hex[:8]}"
        answer = hub.operator.post(
            f"{WEBHOOKS}/{name}", json={"url": "https://agents.example.org/inbox", "topic": topic}
        )
        assert answer.status_code in (200, 201), answer.text
        published = hub.operator.post(f"{TOPICS}/{topic}", json={"type": "note", "payload": "news"})
        assert (published.status_code, published.json().get("recipients")) == (200, 1)
