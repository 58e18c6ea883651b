"""The tokens of tasks: what they are, how long they are worth anything, where they are not, and a restart."""

from __future__ import annotations

import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest

from schemas.streams.principal.principals import token_hash
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import (
    AGENTS,
    MESSAGES,
    TASKS,
    TOKENS,
    HubStack,
    end,
    hub_settings,
    one_of,
    processes_of,
    said,
    wait_quiet,
)

HOUR_MS = 3_600_000


@pytest.mark.requirement("HH-02")
@pytest.mark.requirement("HH-11")
def test_a_token_is_a_uuid_of_one_agent_and_one_task_and_lives_an_hour(hub):
    task = hub.submit("idle")
    assert str(uuid.UUID(task.token)) == task.token
    row = hub.token_of(task.id)
    assert row["token_id"] == token_hash(task.token)[:12] == task.answer["task"]["token_id"]
    assert (row["agent_name"], row["task_id"], row["status"]) == ("idle", task.id, "active")
    assert row["capabilities"] == ["wait", "rest"]
    assert row["expiry"] - row["issued"] == HOUR_MS
    assert abs(row["issued"] / 1000 - time.time()) < 60
    other = hub.submit("idle")
    assert other.token != task.token and hub.token_of(other.id)["token_id"] != row["token_id"]
    for one in (task, other):
        hub.operator.post(f"{TASKS}/{one.id}/cancel", json={})


@pytest.mark.requirement("HH-04")
def test_the_list_of_tokens_shows_no_value_and_is_filtered_by_status(hub):
    active, over = hub.submit("idle"), hub.submit("idle")
    hub.operator.post(f"{TASKS}/{over.id}/complete", json={})
    for client in (hub.operator, hub.client(hub.principal("viewer")[1])):
        listed = client.get(TOKENS, params={"limit": 1000})
        for token in (active.token, over.token):
            assert token not in listed.text and token_hash(token) not in listed.text
    for status, there, absent in (("active", active, over), ("revoked", over, active)):
        tokens = hub.operator.get(TOKENS, params={"status": status, "limit": 1000}).json()["tokens"]
        assert {token["status"] for token in tokens} == {status}
        tasks = [token["task_id"] for token in tokens]
        assert there.id in tasks and absent.id not in tasks
    assert said(hub.client(hub.principal("worker")[1]).get(TOKENS)) == (403, "policy")
    assert said(hub.operator.get(TOKENS, params={"status": "lost"})) == (400, "malformed")
    hub.operator.post(f"{TASKS}/{active.id}/cancel", json={})


@pytest.mark.requirement("HH-02")
def test_an_expired_token_is_refused_everywhere_and_pruned_when_it_is_used(hub):
    brief = hub.add_gateway(token_ttl_s=1)
    with brief.client() as operator:
        task = hub.submit("idle", at=operator)
    wait_until(lambda: hub.operator.get(f"{TASKS}/{task.id}").status_code == 200, what="the task")
    row = hub.token_of(task.id)
    assert row["expiry"] - row["issued"] == 1000
    for number in (0, 1, -1):
        agent = hub.client(task.token, number)
        refused = wait_until(
            lambda agent=agent: (answer := agent.get(MESSAGES)).status_code == 401 and answer, 10, "401"
        )
        assert refused.json()["reason"] == "unauthorized"
        assert refused.headers["WWW-Authenticate"].startswith("Bearer")
        assert agent.post(f"{TASKS}/{task.id}/complete", json={}).status_code == 401
    assert hub.token_of(task.id)["status"] in ("expired", "revoked")
    wait_until(lambda: hub.token_of(task.id)["status"] == "revoked", what="the token is pruned")
    # Only the token is over: what becomes of the task is for others to say.
    assert hub.task(task.id)["status"] == "running"
    hub.operator.post(f"{TASKS}/{task.id}/cancel", json={})
    hub.wait_recycled(task.id)


@pytest.mark.requirement("HH-04")
def test_a_revoked_token_is_worth_nothing_while_its_task_goes_on(hub):
    task, other = hub.submit("idle"), hub.submit("idle")
    token_id = hub.token_of(task.id)["token_id"]
    route = f"{TOKENS}/{token_id}/revoke"
    for number in (0, 1):
        client = hub.client(task.token, number)
        wait_until(lambda client=client: client.get(MESSAGES).status_code == 200, what="a good token")
    for role in ("worker", "viewer"):
        assert said(hub.client(hub.principal(role)[1]).post(route, json={})) == (403, "policy")
    assert said(hub.client(other.token).post(route, json={})) == (403, "policy")
    revoked = hub.operator.post(route, json={"reason": "lost"})
    assert (revoked.status_code, revoked.json()["status"]) == (200, "revoked")
    assert revoked.json()["token_id"] == token_id
    assert said(hub.client(task.token).get(MESSAGES)) == (401, "unauthorized")
    there = hub.client(task.token, 1)
    wait_until(lambda: there.get(MESSAGES).status_code == 401, what="revoked at the other gateway")
    assert hub.task(task.id)["status"] == "running" and processes_of(task.id)
    assert hub.client(other.token).get(MESSAGES).status_code == 200
    assert hub.other.post(route, json={}).json()["status"] == "revoked"
    assert said(hub.operator.post(f"{TOKENS}/0123456789ab/revoke", json={})) == (404, "not_found")
    assert said(hub.operator.post(f"{TOKENS}/{task.token}/revoke", json={})) == (400, "malformed")
    for one in (task, other):
        hub.operator.post(f"{TASKS}/{one.id}/cancel", json={})


@pytest.mark.requirement("HH-02")
@pytest.mark.requirement("HH-05")
def test_the_value_of_no_token_is_on_disk_in_the_log_in_kafka_or_in_any_argument(hub, kafka_broker):
    name, principal_token = hub.principal("delegator")
    delegator = hub.client(principal_token)
    tasks = [hub.submit(agent, at=delegator, key=f"canary-{agent}") for agent in ("echo", "flaky", "idle")]
    tokens = [*[task.token for task in tasks], principal_token]
    for client in (delegator, hub.client(tasks[2].token)):
        # A token where it does not belong: it is refused, or forgotten, but nowhere noted.
        client.get(TASKS, params={"token": tasks[0].token})
        client.get(f"{TASKS}/{tasks[0].token}")
        client.get(MESSAGES, headers={"X-Request-ID": tasks[0].token})
        client.post(MESSAGES, json={"recipient": tasks[0].token, "type": "x", "payload": 1})
        client.post(MESSAGES, json={"recipient": "hub", "type": "x", "token": tasks[0].token})
        client.post(f"{TOKENS}/{tasks[0].token}/revoke", json={})
    for agent in ("echo", "flaky"):
        delegator.post(MESSAGES, json={"recipient": agent, "type": "ask", "payload": {"text": "well?"}})
    wait_until(
        lambda: len(delegator.get(f"/api/hub/mailboxes/default/{name}").json()["messages"]) == 2, what="answers"
    )
    broken = delegator.post(TASKS, json={"agent_name": "broken", "description": "tell your token"})
    assert broken.status_code == 502
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        assert not [token for token in tokens if token in line]
    for task in tasks:
        agent = hub.client(task.token, 1)
        assert agent.post(f"{TASKS}/{task.id}/complete", json={}).status_code == 200
        assert agent.get(MESSAGES).status_code == 401
        hub.wait_recycled(task.id)
    places = [hub.settings.data_path, kafka_broker.log_path.parent, hub.folder]
    files = {path for place in places for path in place.rglob("*") if path.is_file()}
    assert {gateway.program.log_path for gateway in hub.gateways} <= files
    forms = [form for token in tokens for form in (token.encode(), token.replace("-", "").encode())]
    for path in files:
        content = str(path).encode()
        with suppress(FileNotFoundError):  # Kafka removes files of its own
            content += path.read_bytes()
        assert not [form for form in forms if form in content], path
    # Kafka's own files may be compressed.
    text = str(hub.log())
    assert not [token for token in tokens if token in text]


class Restarted:
    """A gateway that was killed with -9 and another one on its log, with what was known before the kill."""

    def __init__(self, stack):
        self.stack = stack
        names = ("lives", "over", "dies", "revoked")
        self.tasks = {name: stack.submit("idle", name, key=name) for name in names}
        note = {"recipient": "idle", "type": "x", "payload": None}
        self.sent = [stack.operator.post(MESSAGES, json=note).json()["message_id"] for _ in range(5)]
        self.taken = self.drained_before()
        stack.operator.post(f"{TASKS}/{self.tasks['over'].id}/complete", json={"result": "7 stars"})
        token_id = stack.token_of(self.tasks["revoked"].id)["token_id"]
        stack.operator.post(f"{TOKENS}/{token_id}/revoke", json={})
        self.agents, self.tokens = (stack.operator.get(path).json() for path in (AGENTS, TOKENS))
        self.agent = one_of(processes_of(self.tasks["lives"].id))
        self.launching = self._kill()
        os.kill(one_of(processes_of(self.tasks["dies"].id)), signal.SIGKILL)
        stack.start(1)

    def drained_before(self):
        """Return the answer of the drain from before the kill."""
        client = self.stack.client(self.tasks["lives"].token)
        return client.get(MESSAGES, params={"limit": 2}, headers={"X-Request-ID": "before"}).json()["messages"]

    def _kill(self):
        """Kill it while it launches an agent, which runs already though nobody has said so; the task's id."""
        gateway = self.stack.gateways.pop()

        def submit():
            with gateway.client() as client, suppress(httpx.HTTPError):
                client.post(TASKS, json={"agent_name": "lazy", "description": "x"})

        def submitted():
            return self.stack.operator.get(TASKS, params={"agent_name": "lazy"}).json()["tasks"]

        with ThreadPoolExecutor(1) as pool:
            pool.submit(submit)
            task_id = wait_until(submitted, what="the task")[0]["id"]
            wait_until(lambda: processes_of(task_id), what="the process")
            gateway.program.kill()
        return task_id


@pytest.fixture(scope="module")
def restarted(kafka_broker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("restarted")
    stack = HubStack(hub_settings(kafka_broker, folder), folder)
    try:
        stack.start(1)
        yield Restarted(stack)
    finally:
        stack.close()


@pytest.mark.requirement("HH-10")
def test_after_kill_9_tokens_tasks_and_messages_are_there_again(restarted):
    stack, tasks = restarted.stack, restarted.tasks
    assert stack.operator.get(AGENTS).json() == restarted.agents
    tokens = {token["token_id"]: token for token in stack.operator.get(TOKENS).json()["tokens"]}
    of_dead = stack.token_of(tasks["dies"].id)["token_id"]
    for token in restarted.tokens["tokens"]:
        assert token["token_id"] == of_dead or tokens[token["token_id"]] == token
    stack.wait_task(tasks["dies"].id, "failed")
    assert stack.task(tasks["over"].id)["result"] == "7 stars"
    for name in ("over", "dies", "revoked"):
        assert said(stack.client(tasks[name].token).get(MESSAGES)) == (401, "unauthorized")
    assert stack.task(tasks["revoked"].id)["status"] == "running"
    assert restarted.drained_before() == restarted.taken
    assert [message["id"] for message in restarted.taken] == restarted.sent[:2]
    mine = stack.client(tasks["lives"].token)
    assert [message["id"] for message in mine.get(MESSAGES).json()["messages"]] == restarted.sent[2:]
    retold = stack.submit("idle", "lives", key="lives")
    assert (retold.id, retold.token) == (tasks["lives"].id, tasks["lives"].token)
    # It runs on as it was, and its new keeper can end it.
    assert one_of(processes_of(retold.id)) == restarted.agent
    assert mine.post(f"{TASKS}/{retold.id}/complete", json={"result": "done"}).json()["status"] == "completed"
    stack.wait_recycled(retold.id)
    kinds = [one.type for one in stack.log() if one.stream == f"task/{retold.id}"]
    assert sorted(set(kinds)) == ["task.completed", "task.started"]


@pytest.mark.requirement("HH-05")
@pytest.mark.requirement("HH-10")
def test_an_agent_whose_gateway_was_killed_at_its_launch_ends_with_its_task(restarted):
    stack, task_id = restarted.stack, restarted.launching
    assert stack.operator.post(f"{TASKS}/{task_id}/cancel", json={}).json()["status"] == "cancelled"
    wait_until(lambda: stack.container_of(task_id)["state"] == "recycled", what="recycled")
    wait_quiet([task_id])


@pytest.mark.requirement("SE-07")
def test_a_task_is_ended_by_its_submitter_and_the_operator_and_by_no_other_delegator_at_any_gateway(hub):
    (_, token), (other_name, other_token) = hub.principal("delegator"), hub.principal("delegator")
    submitter, other = hub.client(token, 1), hub.client(other_token)
    ways = (("cancel", {}), ("complete", {"result": "x"}), ("fail", {"error": "x"}))
    for how, body in ways:
        # The gateway that is asked may not have the task yet, which the other one has answered.
        task = hub.submit("idle", at=hub.client(token, 0))
        by_its_submitter = end(submitter, task, how, body)
        assert by_its_submitter.status_code == 200, by_its_submitter.text
        task = hub.submit("idle", at=hub.client(token, 0))
        assert said(end(other, task, how, body)) == (403, "policy")
        revoke = f"{TOKENS}/{hub.task(task.id)['token_id']}/revoke"
        assert said(other.post(revoke, json={})) == (403, "policy")
        assert (hub.operator if how == "cancel" else submitter).post(revoke, json={}).status_code == 200
        assert end(hub.operator, task, how, body).status_code == 200
    assert said(other.post(f"{TASKS}/there-is-none/cancel", json={})) == (403, "policy")
    rows = wait_until(lambda: len(found := hub.refusals(other_name)) == 7 and found, what="a row for each")
    routes = [row["route"].rpartition("/")[2] for row in rows]
    assert sorted(routes) == ["cancel", "cancel", "complete", "fail", "revoke", "revoke", "revoke"]
