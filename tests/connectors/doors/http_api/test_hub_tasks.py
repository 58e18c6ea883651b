"""Tasks at two gateways, with agents that are really launched, from submission to recycled container."""

from __future__ import annotations

import itertools
import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import psutil
import pytest
from kafka import KafkaConsumer, TopicPartition

from schemas.log_access.kafka_clients import client_options
from schemas.streams.principal.principals import token_hash
from schemas.wire.record import partition_for
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import server_events
from tests.connectors.doors.http_api.hub_stack import (
    CHECK_S,
    MESSAGES,
    TASKS,
    end,
    one_of,
    processes_of,
    said,
    wait_quiet,
)

TOKEN, HUB_URL = "TRUNKLINE_AGENT_TOKEN", "TRUNKLINE_HUB_URL"
STATES = ["provisioning", "configuring", "starting", "running", "monitoring", "recycling", "recycled"]

# A task's id follows from its key: two runs at once must not find each other's processes.
RUN = uuid.uuid4().hex


def drained(client):
    """Return the messages of a mailbox as soon as it has any."""
    return wait_until(lambda: client.get(MESSAGES).json()["messages"], what="a message")


def ask(client, recipient, kind="ask", payload=None):
    """Send a message; its id."""
    answer = client.post(MESSAGES, json={"recipient": recipient, "type": kind, "payload": payload})
    assert answer.status_code == 200, answer.text
    return answer.json()["message_id"]


@pytest.mark.requirement("HH-03")
@pytest.mark.requirement("HH-04")
@pytest.mark.requirement("HH-05")
@pytest.mark.requirement("HH-07")
def test_an_agent_answers_finishes_and_is_gone_with_its_token_and_container(hub):
    name, token = hub.principal("delegator")
    delegator = hub.client(token)
    task = hub.submit("echo", "answer what is asked", at=delegator)
    assert [task.answer["task"][n] for n in ("status", "agent_name", "description", "submitted_by")] == [
        "running",
        "echo",
        "answer what is asked",
        f"http/{name}",
    ]
    urls = {gateway.url for gateway in hub.gateways}
    agent = psutil.Process(one_of(processes_of(task.id)))
    environment = agent.environ()
    assert task.answer["url"] in urls and environment[HUB_URL] in urls
    assert environment[TOKEN] == task.token and task.token not in " ".join(agent.cmdline())
    wait_until(lambda: hub.container_of(task.id)["state"] == "monitoring", what="the container is watched")
    asked = ask(delegator, "echo", payload={"text": "how far is it?"})
    answer = one_of(drained(delegator))
    assert [answer[n] for n in ("sender", "recipient", "type")] == ["echo", name, "answer"]
    assert "how far is it?" in answer["payload"]["text"] and answer["payload"]["in_reply_to"] == asked
    ask(delegator, "echo", "finish")
    row = hub.wait_task(task.id, "completed")
    assert (row["result"], row["error"]) == ("answered 1", None)
    assert row["started_at"] <= row["ended_at"]
    # The end is seen at the first gateway; the other one hears of it by itself.
    for gateway in (0, 1):
        client = hub.client(task.token, gateway)
        wait_until(lambda client=client: client.get(MESSAGES).status_code == 401, what="the token's end")
        assert said(client.get(MESSAGES)) == (401, "unauthorized")
    assert hub.token_of(task.id)["status"] == "revoked"
    hub.wait_recycled(task.id)
    wait_until(lambda: not agent.is_running(), what="the end of the process")
    records = [(one.type, one.source) for one in hub.log() if one.stream == f"task/{task.id}"]
    assert records[0] == ("task.started", f"http/{name}")
    # The end is the reactor's alone: no door has chained it to the message.
    assert {source for kind, source in records if kind == "task.completed"} == {"reactor/reactor"}


@pytest.mark.requirement("HH-03")
def test_one_record_makes_task_and_token_and_sets_it_running(hub):
    task = hub.submit("idle")
    record = one_of([one for one in hub.log() if one.stream == f"task/{task.id}"])
    assert record.type == "task.started"
    assert (record.body["description"], record.body["agent_name"]) == ("some work", "idle")
    assert record.body["token_sha256"] == token_hash(task.token) and task.token not in str(record.body)
    assert record.body["capabilities"] == ["wait", "rest"]
    end(hub.operator, task, "cancel")


@pytest.mark.requirement("HB-02")
def test_the_result_of_a_task_is_any_json_by_whichever_way_it_comes(hub):
    for result in ({"stars": [1, 2.5, None]}, [True, "x"], 42, "42", "null", "plain text", ""):
        told, sent = hub.submit("idle"), hub.submit("idle")
        done = end(hub.operator, told, "complete", {"result": result})
        assert (done.status_code, done.json()["result"]) == (200, result), done.text
        ask(hub.client(sent.token), "hub", "event", {"event": "task.completed", "result": result})
        assert hub.wait_task(sent.id, "completed")["result"] == result
        for task in (told, sent):
            wait_until(lambda t=task.id, r=result: hub.other.get(f"{TASKS}/{t}").json()["result"] == r)
    task = hub.submit("idle")
    refused = end(hub.operator, task, "complete", {"result": ["x" * 65_536]})
    assert said(refused) == (400, "malformed") and "65540 bytes" in refused.json()["message"]
    largest = end(hub.operator, task, "complete", {"result": ["x" * 65_532]})
    assert largest.json()["result"] == ["x" * 65_532]


@pytest.mark.requirement("HH-04")
@pytest.mark.requirement("HH-05")
def test_each_transition_of_a_task_and_each_state_of_its_container_is_an_event(hub):
    with (
        hub.operator.stream("GET", "/api/hub/events", params={"kind": "task", "verdict": "accepted"}) as tasks,
        hub.operator.stream(
            "GET", "/api/hub/events", params={"kind": "container", "verdict": "accepted"}
        ) as made,
    ):
        of_tasks, of_containers = server_events(tasks), server_events(made)
        assert {next(of_tasks).name, next(of_containers).name} == {"snapshot"}
        task = hub.submit("idle")
        assert end(hub.operator, task, "cancel", {"reason": "it rains"}).status_code == 200
        ours = (event.data for event in of_tasks if event.data["stream"] == f"task/{task.id}")
        seen = [(event["type"], event["status_after"]) for event in itertools.islice(ours, 2)]
        assert seen == [("task.started", "running"), ("task.cancelled", "cancelled")]
        states = (event.data["body"] for event in of_containers)
        ours = (body["state"] for body in states if body["task_id"] == task.id)
        # It may be cancelled before it is watched; then it goes straight to its end.
        seen = list(itertools.takewhile(lambda state: state != "recycled", ours))
    assert seen[:4] == STATES[:4] and seen[-1] == "recycling"
    assert seen == [state for state in STATES if state in seen]


@pytest.mark.requirement("HH-04")
def test_a_task_submitted_at_one_gateway_is_found_and_listed_at_the_other(hub):
    first, second = hub.submit("lazy", "the first"), hub.submit("lazy", "the second")
    wait_until(lambda: hub.other.get(f"{TASKS}/{second.id}").status_code == 200, what="the task")
    for client in (hub.operator, hub.other):
        shown = client.get(f"{TASKS}/{first.id}").json()
        assert shown == first.answer["task"] and shown["status"] == shown["status"].lower()
        listed = client.get(TASKS, params={"agent_name": "lazy", "status": "running"}).json()
        assert [task["id"] for task in listed["tasks"]] == [second.id, first.id] and listed["total"] == 2
        assert len(client.get(TASKS, params={"agent_name": "lazy", "limit": 1}).json()["tasks"]) == 1
        assert client.get(TASKS, params={"agent_name": "lazy", "status": "failed"}).json()["tasks"] == []
    for task in (first, second):
        assert end(hub.other, task, "cancel").json()["status"] == "cancelled"
    assert said(hub.operator.get(f"{TASKS}/nothing")) == (404, "not_found")


@pytest.mark.requirement("HH-03")
@pytest.mark.requirement("HH-12")
def test_one_key_at_both_gateways_at_once_is_one_task_one_token_and_one_process(hub):
    key, body = {"Idempotency-Key": f"one-task-{RUN}"}, {"agent_name": "idle", "description": "once"}

    def submit(number):
        return (hub.operator, hub.other)[number % 2].post(TASKS, json=body, headers=key)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(8)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["task"]["id"] for answer in answers}) == 1
    assert len({answer.json()["token"] for answer in answers}) == 1
    task_id = answers[0].json()["task"]["id"]
    one_of(processes_of(task_id))
    for other in ({"description": "twice"}, {"agent_name": "lazy"}):
        for client in (hub.operator, hub.other):
            assert said(client.post(TASKS, json=body | other, headers=key)) == (409, "seq_conflict")
    assert hub.task(task_id)["status"] == "running"
    hub.operator.post(f"{TASKS}/{task_id}/cancel", json={})
    hub.wait_recycled(task_id)


@pytest.mark.requirement("HH-03")
@pytest.mark.parametrize(
    ("how", "body"), [("complete", {"result": "7"}), ("fail", {"error": "no"}), ("cancel", {})]
)
def test_a_submission_sent_again_after_the_end_tells_the_same_task_and_token(hub, how, body):
    task = hub.submit("idle", key=f"again-after-{how}-{RUN}")
    assert end(hub.operator, task, how, body).status_code == 200
    hub.wait_recycled(task.id)
    for client in (hub.operator, hub.other):
        again = client.post(
            TASKS,
            json={"agent_name": "idle", "description": "some work"},
            headers={"Idempotency-Key": f"again-after-{how}-{RUN}"},
        )
        # It was launched, and ended later: that is no failure of its launch.
        assert again.status_code == 201, again.text
        assert (again.json()["task"]["id"], again.json()["token"]) == (task.id, task.token)
    assert processes_of(task.id) == []


@pytest.mark.requirement("HH-05")
def test_a_task_whose_agent_dies_or_is_killed_fails_by_itself(hub):
    delegator = hub.client(hub.principal("delegator")[1])
    crashing, killed = hub.submit("flaky", "crash, please"), hub.submit("idle")
    ask(delegator, "flaky", payload={"text": "still there?"})
    os.kill(one_of(processes_of(killed.id)), signal.SIGKILL)
    assert "still there?" in one_of(drained(delegator))["payload"]["text"]
    for task in (crashing, killed):
        row = hub.wait_task(task.id, "failed")
        assert row["error"] and row["result"] is None
        assert said(hub.client(task.token).get(MESSAGES)) == (401, "unauthorized")
        assert hub.token_of(task.id)["status"] == "revoked"
        hub.wait_recycled(task.id)
        ends = [one for one in hub.log() if one.stream == f"task/{task.id}" and one.type != "task.started"]
        assert {(one.type, one.source.split("/")[0]) for one in ends} == {("task.failed", "launcher")}


@pytest.mark.requirement("HH-03")
@pytest.mark.requirement("HH-05")
@pytest.mark.parametrize("agent", ["unruled", "broken"])
def test_a_launch_that_fails_is_told_to_the_caller_and_ends_task_and_token(hub, agent):
    body, key = {"agent_name": agent, "description": "x"}, {"Idempotency-Key": f"launch-{agent}"}
    answers = [client.post(TASKS, json=body, headers=key) for client in (hub.operator, hub.other)]
    assert [said(answer) for answer in answers] == [(502, "launch_failed")] * 2
    assert answers[0].json()["message"] == answers[1].json()["message"]
    row = one_of(hub.operator.get(TASKS, params={"agent_name": agent}).json()["tasks"])
    assert row["status"] == "failed" and row["error"] == answers[0].json()["message"]
    assert hub.token_of(row["id"])["status"] == "revoked"
    hub.wait_recycled(row["id"])
    assert hub.container_of(row["id"])["error"]


@pytest.mark.requirement("HH-04")
@pytest.mark.requirement("HH-12")
def test_a_cancelled_task_loses_its_process_and_its_token_and_is_final(hub):
    task = hub.submit("idle")
    agent = psutil.Process(one_of(processes_of(task.id)))
    answer = end(hub.other, task, "cancel", {"reason": "it rains"})
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    wait_until(lambda: not agent.is_running(), what="the process is gone")
    hub.wait_recycled(task.id)
    for gateway in (0, 1):
        assert said(hub.client(task.token, gateway).get(MESSAGES)) == (401, "unauthorized")
    for how, body in (("cancel", {}), ("complete", {"result": "late"}), ("fail", {"error": "late"})):
        for client in (hub.operator, hub.other):
            assert said(end(client, task, how, body)) == (409, "after_terminal")
    assert hub.task(task.id)["status"] == "cancelled" and hub.task(task.id)["result"] is None


@pytest.mark.requirement("HH-05")
def test_a_task_cancelled_at_one_gateway_while_it_is_launched_leaves_no_process(hub):
    tasks = []
    for turn in range(4):
        known = {task["id"] for task in hub.other.get(TASKS, params={"agent_name": "idle"}).json()["tasks"]}

        def new(known=known):
            listed = hub.other.get(TASKS, params={"agent_name": "idle", "status": "running"}).json()["tasks"]
            return [task["id"] for task in listed if task["id"] not in known]

        with ThreadPoolExecutor(1) as pool:
            body = {"agent_name": "idle", "description": f"cancelled at once {turn}"}
            submission = pool.submit(hub.operator.post, TASKS, json=body)
            task_id = one_of(wait_until(new, what="the task"))
            cancelled = hub.other.post(f"{TASKS}/{task_id}/cancel", json={})
            assert cancelled.json()["status"] == "cancelled"
            assert submission.result(20).status_code < 500
        tasks.append(task_id)
    wait_quiet(tasks)
    for task_id in tasks:
        assert hub.task(task_id)["status"] == "cancelled"


@pytest.mark.requirement("HH-04")
@pytest.mark.requirement("HH-09")
def test_a_task_is_ended_by_its_own_token_and_by_no_other_tasks(hub):
    mine, namesake, other = hub.submit("idle"), hub.submit("idle"), hub.submit("lazy")
    own, elsewhere = hub.client(mine.token), hub.client(other.token, 1)
    wait_until(lambda: elsewhere.get(MESSAGES).status_code == 200, what="the other gateway knows the token")
    for stranger in (hub.client(namesake.token), hub.client(other.token), elsewhere):
        for how, body in (("complete", {"result": "x"}), ("fail", {"error": "x"}), ("cancel", {})):
            assert said(end(stranger, mine, how, body)) == (403, "policy")
    for role in ("worker", "viewer"):
        client = hub.client(hub.principal(role)[1])
        assert said(end(client, mine, "complete", {"result": "x"})) == (403, "policy")
    assert hub.task(mine.id)["status"] == "running"
    assert own.get(f"{TASKS}/{mine.id}").json()["id"] == mine.id
    assert said(own.get(f"{TASKS}/{other.id}")) == (403, "policy")
    done = end(own, mine, "complete", {"result": "7 stars"})
    assert (done.status_code, done.json()["status"], done.json()["result"]) == (200, "completed", "7 stars")
    failed = end(hub.client(other.token), other, "fail", {"error": "no telescope"})
    assert (failed.status_code, failed.json()["status"], failed.json()["error"]) == (
        200,
        "failed",
        "no telescope",
    )
    assert end(hub.operator, namesake, "complete").json()["status"] == "completed"
    for task in (mine, namesake, other):
        assert said(hub.client(task.token).get(MESSAGES)) == (401, "unauthorized")
        hub.wait_recycled(task.id)


@contextmanager
def reactor_that_hangs(settings, stream):
    """Members of the reactors' group that have the partition of `stream` and do nothing with it, as one has it
    that was killed, until its session is over.
    """
    wanted = TopicPartition(settings.kafka.topic, partition_for(stream.encode(), settings.kafka.partitions))
    with ExitStack() as stack:
        members = []
        for _ in range(settings.kafka.partitions):
            member = KafkaConsumer(
                settings.kafka.topic,
                **client_options(settings.kafka),
                group_id=settings.gateway.reactor_group,
                client_id="a-reactor-that-hangs",  # Kafka gives partitions by the order of these names
                enable_auto_commit=False,
            )
            stack.callback(member.close, autocommit=False)
            members.append(member)
        deadline = time.monotonic() + 20
        while not any(wanted in member.assignment() for member in members):
            assert time.monotonic() < deadline, "the partition is not to be had"
            for member in members:
                member.poll(timeout_ms=50)
        yield


@pytest.mark.requirement("HH-07")
@pytest.mark.requirement("HH-10")
def test_a_task_whose_agent_said_that_it_is_done_never_fails_for_its_process(hub):
    task, other = hub.submit("echo"), hub.submit("idle")
    with reactor_that_hangs(hub.settings, "mailbox/default/hub"):
        ask(hub.operator, "echo", "finish")
        wait_until(lambda: not processes_of(task.id), what="the agent has ended")

        def told():
            found = hub.operator.get("/api/hub/mailboxes/default/hub", params={"limit": 1}).json()["messages"]
            return [message["from_task"] for message in found] == [task.id]

        # The agent may have said it to the other gateway.
        wait_until(told, what="what the agent has said")
        # When this one, killed two checks later, is found dead, the first one could have been, too.
        gone_at = time.monotonic()
        wait_until(lambda: time.monotonic() > gone_at + 2 * CHECK_S, what="two checks")
        os.kill(one_of(processes_of(other.id)), signal.SIGKILL)
        hub.wait_task(other.id, "failed")
        assert hub.task(task.id)["status"] != "failed"
    assert hub.wait_task(task.id, "completed")["result"] == "answered 0"
    hub.wait_recycled(task.id)
