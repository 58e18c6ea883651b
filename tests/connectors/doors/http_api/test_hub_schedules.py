"""Schedules at two gateways (DL-23): each run is posted once, and only who set a schedule may change it."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import takewhile

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import MESSAGES, one_of, said

pytestmark = pytest.mark.requirement("DL-23")

SCHEDULES, MAILBOXES = "/api/hub/schedules", "/api/hub/mailboxes"
_numbers = itertools.count(1)


def fresh():
    """A name that no schedule has yet."""
    return f"schedule-{next(_numbers)}"


def asked(recipient, **changed):
    """The body that sets a schedule; without another timing, it runs every hour."""
    timing = {} if "cron" in changed else {"every_s": 3600}
    return {"recipient": recipient, "type": "remind", "payload": {"text": "tea"}, **timing, **changed}


def set_up(client, name, recipient, key=None, **changed):
    """The answer to a request that sets a schedule."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"{SCHEDULES}/{name}", json=asked(recipient, **changed), headers=headers)


def shown(client, name):
    """A schedule, as a gateway shows it."""
    answer = client.get(f"{SCHEDULES}/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def member(hub, role="worker"):
    """A new principal: its name, and a client of it at each gateway."""
    name, token = hub.principal(role)
    return name, hub.client(token), hub.client(token, 1)


def messages(hub, name):
    """All messages of a mailbox, in the order of their posting."""
    found = hub.operator.get(f"{MAILBOXES}/default/{name}", params={"limit": 1000}).json()["messages"]
    return sorted(found, key=lambda message: message["posted_at"])


def times(moments):
    """Moments as datetimes."""
    return [datetime.fromisoformat(moment) for moment in moments]


def test_two_gateways_post_each_run_of_a_schedule_once_until_it_is_removed(hub):
    owner, here, _ = member(hub)
    reader, reading, _ = member(hub)
    name = fresh()
    row = set_up(here, name, reader, every_s=1, priority="high", expires_in_s=600).json()
    assert (row["owner"], row["runs"], row["last_run_at"]) == (owner, 0, None)
    runs = times(row["next_runs"])
    assert [run - runs[0] for run in runs] == [timedelta(seconds=number) for number in range(5)]
    wait_until(lambda: hub.other.get(f"{SCHEDULES}/{name}").status_code == 200, what="the other gateway has it")
    wait_until(lambda: shown(hub.other, name)["runs"] >= 3, what="some runs at the other gateway")
    wait_until(lambda: is_recorded_twice(hub, name), 60, "a run that both gateways record")
    with fallen_behind(hub):
        removed = here.post(f"{SCHEDULES}/{name}/remove", json={}).json()
    assert (removed["status"], removed["next_runs"], removed["next_run_at"]) == ("removed", [], None)
    count = removed["runs"]
    wait_until(lambda: len(messages(hub, reader)) == count, what="the message of each run")
    found = messages(hub, reader)
    # One message for each second, at most a few seconds after it.
    assert times(message["sent_at"] for message in found) == [
        runs[0] + timedelta(seconds=number) for number in range(count)
    ]
    assert all(late < timedelta(seconds=10) for late in lateness(found))
    assert {(m["sender"], m["from_verified"], m["kind"], m["priority"]) for m in found} == {
        (owner, True, "remind", "high")
    }
    recorded = recorded_runs(hub, name)
    assert (len(recorded), max(recorded.values())) == (count, 2)
    posted = [
        one for one in hub.log() if one.stream == f"mailbox/default/{reader}" and one.type == "message.posted"
    ]
    assert len({one.body["message_id"] for one in posted}) == count
    time.sleep(2.5)
    assert len(messages(hub, reader)) == count
    taken = reading.get(MESSAGES).json()["messages"]
    assert len(taken) == count
    assert {(m["sender"], m["type"], m["payload"]["text"]) for m in taken} == {(owner, "remind", "tea")}


def recorded_runs(hub, name):
    """How often each run of a schedule is in the log before the schedule is removed.

    A gateway that has not seen the removal yet may record one run more. The fold rejects it.
    """
    log = (one for one in hub.log() if one.stream == f"schedule/{name}")
    before = takewhile(lambda one: one.type != "schedule.removed", log)
    return Counter(one.body["run_at"] for one in before if one.type == "schedule.ran")


@contextmanager
def fallen_behind(hub):
    """For the block, the second gateway stands still with a run due, and has not seen what is settled."""
    behind = hub.gateways[1].program.process
    behind.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    try:
        yield
    finally:
        behind.send_signal(signal.SIGCONT)


def is_recorded_twice(hub, name):
    """Let the second gateway fall behind, so that it records runs that are settled; true if it has done so."""
    with fallen_behind(hub):
        pass
    time.sleep(1)
    return 2 in recorded_runs(hub, name).values()


def lateness(found):
    """How long after its run each message was posted."""
    return [
        posted - run
        for posted, run in zip(
            times(message["posted_at"] for message in found),
            times(message["sent_at"] for message in found),
            strict=True,
        )
    ]


def test_a_cron_expression_is_shown_with_its_next_runs_in_utc(hub):
    _, here, there = member(hub)
    name = fresh()
    row = set_up(here, name, "hub", cron="30 9 * * mon-fri", missed="latest").json()
    assert (row["cron"], row["every_s"], row["missed"], row["revision"]) == (
        "30 9 * * mon-fri",
        None,
        "latest",
        1,
    )
    assert len(row["next_runs"]) == 5
    assert row["next_runs"][0] == row["next_run_at"]
    for run in times(row["next_runs"]):
        assert (run.utcoffset(), run.hour, run.minute) == (timedelta(), 9, 30)
        assert run.weekday() < 5
    wait_until(lambda: there.get(f"{SCHEDULES}/{name}").is_success, what="the other gateway")
    assert shown(there, name) == row


def test_a_repeated_request_is_the_same_and_another_one_begins_the_runs_anew(hub):
    _, here, there = member(hub)
    name = fresh()
    first = set_up(here, name, "hub", key="k-1")
    assert (first.status_code, first.headers["Trunkline-Verdict"]) == (200, "accepted")
    again = set_up(there, name, "hub", key="k-1")
    assert (again.json(), again.headers["Trunkline-Verdict"]) == (first.json(), "duplicate")
    assert said(set_up(here, name, "hub", key="k-1", every_s=60)) == (409, "seq_conflict")
    anew = set_up(here, name, "hub", every_s=60).json()
    assert (anew["revision"], anew["every_s"], anew["runs"]) == (2, 60, 0)


def test_only_the_owner_and_the_operator_see_replace_and_remove_a_schedule(hub):
    owner, here, _ = member(hub, "delegator")
    stranger, other, elsewhere = member(hub)
    _, viewer, _ = member(hub, "viewer")
    name = fresh()
    assert set_up(here, name, "hub").status_code == 200
    for client in (other, elsewhere, viewer):
        assert said(client.get(f"{SCHEDULES}/{name}")) == (403, "policy")
        assert said(set_up(client, name, "hub")) == (403, "policy")
        assert said(client.post(f"{SCHEDULES}/{name}/remove", json={})) == (403, "policy")
    assert said(viewer.get(SCHEDULES)) == (403, "policy")
    assert [one["schedule"] for one in here.get(SCHEDULES).json()["schedules"]] == [name]
    assert other.get(SCHEDULES).json() == {"schedules": [], "total": 0, "left": 0}
    listed = hub.operator.get(SCHEDULES, params={"limit": 1000}).json()
    assert name in {one["schedule"] for one in listed["schedules"]}
    assert listed["total"] == len(listed["schedules"])
    assert len(hub.operator.get(SCHEDULES, params={"limit": 1}).json()["schedules"]) == 1
    taken = set_up(hub.operator, name, "hub").json()
    assert (taken["owner"], taken["revision"]) == ("operator", 2)
    wait_until(lambda: said(here.get(f"{SCHEDULES}/{name}")) == (403, "policy"), what="it is the operator's")
    assert hub.operator.post(f"{SCHEDULES}/{name}/remove", json={}).status_code == 200
    assert said(hub.operator.post(f"{SCHEDULES}/{name}/remove", json={})) == (409, "illegal_transition")
    # The name is free now.
    row = set_up(other, name, "hub").json()
    assert (row["owner"], row["revision"], row["status"]) == (stranger, 3, "active")
    wait_until(lambda: len(hub.refusals(owner)) >= 1, what="the owner's refusal is recorded")
    assert {one["reason"] for one in hub.refusals(stranger)} == {"policy"}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"every_s": None}, "exactly one of cron and every_s"),
        ({"cron": "* * * * *", "every_s": 60}, "exactly one of cron and every_s"),
        ({"cron": "0 0 31 2 *"}, "never runs"),
        ({"cron": "* * * * * *"}, "minute, hour, day of month"),
        ({"missed": "some"}, "'skip', 'latest' or 'all'"),
        ({"payload": "x" * 65_536}, "has 65538 characters as text"),
    ],
)
def test_a_request_that_makes_no_sense_is_malformed_and_says_why(hub, changed, why):
    answer = set_up(hub.operator, fresh(), "hub", **changed)
    assert said(answer) == (400, "malformed")
    assert why in answer.json()["message"]


def test_the_schedules_of_a_revoked_principal_end_before_their_next_run(hub):
    owner, here, _ = member(hub)
    reader, _, _ = member(hub)
    name = fresh()
    assert set_up(here, name, reader, every_s=2).status_code == 200
    wait_until(lambda: shown(hub.operator, name)["runs"] >= 1, what="a run")
    assert hub.operator.post(f"/api/hub/principals/{owner}/revoke").status_code == 200
    revoked_at = datetime.fromisoformat(
        one_of(
            one
            for one in hub.operator.get("/api/hub/principals").json()["principals"]
            if one["principal"] == owner
        )["revoked_at"]
    )
    wait_until(lambda: shown(hub.operator, name)["status"] == "removed", what="the schedule is removed")
    count = shown(hub.operator, name)["runs"]
    wait_until(lambda: len(messages(hub, reader)) == count, what="the messages of its runs")
    time.sleep(2.5)
    assert len(messages(hub, reader)) == count
    assert all(
        run <= revoked_at + timedelta(seconds=2) for run in times(m["sent_at"] for m in messages(hub, reader))
    )


def test_the_agent_of_a_task_keeps_schedules_until_its_task_ends(hub):
    reader, _, _ = member(hub)
    task = hub.submit("idle")
    agent, name = hub.client(task.token), fresh()
    row = set_up(agent, name, reader, every_s=1).json()
    assert (row["owner"], row["from_task"]) == ("idle", task.id)
    assert shown(agent, name)["schedule"] == name
    # The agent of another task has the same name.
    other = hub.client(hub.submit("idle").token)
    assert said(other.post(f"{SCHEDULES}/{name}/remove", json={})) == (403, "policy")
    assert other.get(SCHEDULES).json()["total"] == 0
    wait_until(lambda: shown(hub.operator, name)["runs"] >= 1, what="a run")
    assert hub.operator.post(f"/api/hub/tasks/{task.id}/cancel", json={}).status_code == 200
    wait_until(lambda: shown(hub.operator, name)["status"] == "removed", what="the schedule is removed")
    assert {m["sender"] for m in messages(hub, reader)} == {"idle"}
    # The capabilities of this agent name another action.
    limited = hub.client(hub.submit("quiet").token)
    assert said(set_up(limited, fresh(), reader)) == (403, "policy")
