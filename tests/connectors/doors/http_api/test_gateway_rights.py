"""Every route of a running gateway, asked by every role: who gets in, and that answers are as documented."""

from __future__ import annotations

import json
from typing import NamedTuple

import jsonschema
import pytest

from schemas.streams.refused.refusal import POLICY_VERSION
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import add_principal, register
from trunkline_agent.mcp.signing import new_key_pair

ROLES = ("operator", "delegator", "worker", "viewer")
PUBLIC_KEY, OTHER_KEY = new_key_pair()[1], new_key_pair()[1]
_TOKEN = "000000000000"
_LEASED = {"lease_id": "l1", "message_ids": ["m1"]}
_TASK = {"description": "x", "agent_name": "nobody"}


class Ask(NamedTuple):
    """A request, and the roles that may make it, by initials; `found` False: it is about what is not there, so
    that who gets in is answered 404. `status`: what else who gets in is answered.
    """

    roles: str
    method: str
    path: str
    body: dict | None = None
    found: bool = True
    status: int | None = None


def questions(held, free, mine, role):
    """One question for each route; sessions and principals have names of their own for each role."""
    hub = "/api/hub"
    own = f"made-by-{role}"
    return {
        f"{hub}/jobs GET": Ask("odv", "GET", f"{hub}/jobs"),
        f"{hub}/jobs POST": Ask("od", "POST", f"{hub}/jobs", {"description": "x"}),
        f"{hub}/jobs/pick POST": Ask("ow", "POST", f"{hub}/jobs/pick", {"session": "the-worker"}),
        f"{hub}/jobs/{{job_id}} GET": Ask("odwv", "GET", f"{hub}/jobs/{held}"),
        f"{hub}/jobs/{{job_id}}/events GET": Ask("odwv", "GET", f"{hub}/jobs/{held}/events"),
        f"{hub}/jobs/{{job_id}}/events POST": Ask(
            "odw", "POST", f"{hub}/jobs/{held if role == 'worker' else mine[role]}/events", {}, status=400
        ),
        f"{hub}/jobs/{{job_id}}/cancel POST": Ask("od", "POST", f"{hub}/jobs/{free[role]}/cancel", {}),
        f"{hub}/jobs/{{job_id}}/assign POST": Ask(
            "od", "POST", f"{hub}/jobs/{mine[role]}/assign", {"session": f"for-{role}"}
        ),
        f"{hub}/jobs/{{job_id}}/secret POST": Ask("od", "POST", f"{hub}/jobs/{mine[role]}/secret", {}),
        f"{hub}/events GET": Ask("odv", "GET", f"{hub}/events"),
        f"{hub}/verdicts GET": Ask("o", "GET", f"{hub}/verdicts"),
        f"{hub}/brokers GET": Ask("o", "GET", f"{hub}/brokers"),
        f"{hub}/sessions GET": Ask("odv", "GET", f"{hub}/sessions"),
        f"{hub}/sessions POST": Ask("od", "POST", f"{hub}/sessions", {"session": own}),
        f"{hub}/sessions/{{name}} GET": Ask("odv", "GET", f"{hub}/sessions/made-by-operator"),
        f"{hub}/sessions/{{name}}/stop POST": Ask("od", "POST", f"{hub}/sessions/{own}/stop", {"mode": "stop"}),
        f"{hub}/sessions/{{name}}/resume POST": Ask("od", "POST", f"{hub}/sessions/{own}/resume", {}),
        f"{hub}/principals GET": Ask("o", "GET", f"{hub}/principals"),
        f"{hub}/principals POST": Ask("o", "POST", f"{hub}/principals", {"principal": own, "role": "viewer"}),
        f"{hub}/principals/{{name}}/revoke POST": Ask("o", "POST", f"{hub}/principals/{own}/revoke", {}),
        **mailbox_questions(hub, role),
        f"{hub}/messages POST": Ask("odw", "POST", f"{hub}/messages", {"recipient": "hub", "type": "x"}),
        f"{hub}/messages GET": Ask("odw", "GET", f"{hub}/messages"),
        f"{hub}/blobs PUT": Ask("odw", "PUT", f"{hub}/blobs", {}),
        f"{hub}/audit GET": Ask("odv", "GET", f"{hub}/audit"),
        f"{hub}/agents GET": Ask("odwv", "GET", f"{hub}/agents"),
        f"{hub}/agents/{{name}} GET": Ask("odwv", "GET", f"{hub}/agents/nobody", found=False),
        f"{hub}/containers GET": Ask("odv", "GET", f"{hub}/containers"),
        f"{hub}/tasks GET": Ask("odv", "GET", f"{hub}/tasks"),
        f"{hub}/tasks POST": Ask("od", "POST", f"{hub}/tasks", _TASK, found=False),
        f"{hub}/tasks/{{task_id}} GET": Ask("odv", "GET", f"{hub}/tasks/t1", found=False),
        # A task that does not exist has no owner: a delegator may end its own tasks.
        f"{hub}/tasks/{{task_id}}/complete POST": Ask("o", "POST", f"{hub}/tasks/t1/complete", found=False),
        f"{hub}/tasks/{{task_id}}/fail POST": Ask("o", "POST", f"{hub}/tasks/t1/fail", {"error": "x"}, False),
        f"{hub}/tasks/{{task_id}}/cancel POST": Ask("o", "POST", f"{hub}/tasks/t1/cancel", found=False),
        f"{hub}/tasks/{{task_id}} DELETE": Ask("o", "DELETE", f"{hub}/tasks/t1", found=False),
        **participant_questions(hub, role),
        **message_questions(hub),
        **topic_questions(hub, role),
        **schedule_questions(hub, role),
        **webhook_questions(hub, role),
        # JSON is no XML, behind the gate.
        "/messages POST": Ask("odw", "POST", "/messages", {}, status=415),
        f"{hub}/listeners GET": Ask("o", "GET", f"{hub}/listeners"),
        f"{hub}/threads GET": Ask("o", "GET", f"{hub}/threads"),
        f"{hub}/threads/{{name}} GET": Ask("o", "GET", f"{hub}/threads/nobody", found=False),
        f"{hub}/pump/started POST": Ask("o", "POST", f"{hub}/pump/started", {"pump": own}),
        f"{hub}/pump/lease POST": Ask("o", "POST", f"{hub}/pump/lease", {"pump": own, "wants": {}, "free": 1}),
        f"{hub}/pump/settle POST": Ask("o", "POST", f"{hub}/pump/settle", {"pump": own, "done": []}),
        f"{hub}/pump/history POST": Ask(
            "o", "POST", f"{hub}/pump/history", {"listener": "nobody", "thread": "nothing"}
        ),
        f"{hub}/limits GET": Ask("o", "GET", f"{hub}/limits"),
        f"{hub}/limits/{{scope}}/{{name}} POST": Ask("o", "POST", f"{hub}/limits/name/{own}", {}),
        f"{hub}/mqtt-load POST": Ask("o", "POST", f"{hub}/mqtt-load", {"agents": {"nobody": 1}}),
        f"{hub}/tokens GET": Ask("odv", "GET", f"{hub}/tokens"),
        f"{hub}/tokens/{{token_id}}/revoke POST": Ask(
            "o", "POST", f"{hub}/tokens/{12 * '0'}/revoke", {}, False
        ),
    }


def mailbox_questions(hub, role):
    """Routes about a mailbox of a name, here the role's own."""
    roles, path = "odw" if role != "viewer" else "o", f"{hub}/mailboxes/default/the-{role}"
    route = f"{hub}/mailboxes/{{realm}}/{{name}}"
    return {
        f"{route} GET": Ask(roles, "GET", path),
        f"{route}/messages/{{message_id}}/replay POST": Ask(
            roles, "POST", f"{path}/messages/m1/replay", found=False
        ),
        f"{route}/messages/{{message_id}}/blob GET": Ask(roles, "GET", f"{path}/messages/m1/blob", found=False),
        f"{route}/clear POST": Ask("o", "POST", f"{path}/clear", {}),
        f"{hub}/messages/dead GET": Ask("o", "GET", f"{hub}/messages/dead"),
    }


def message_questions(hub):
    """The questions about messages, but for sending and draining them."""
    return {
        f"{hub}/messages/broadcast POST": Ask("odw", "POST", f"{hub}/messages/broadcast", {"type": "x"}),
        f"{hub}/messages/read POST": Ask("odw", "POST", f"{hub}/messages/read", {"message_ids": ["m1"]}),
        f"{hub}/messages/events GET": Ask("odw", "GET", f"{hub}/messages/events"),
        **{
            f"{hub}/messages/{how} POST": Ask("odw", "POST", f"{hub}/messages/{how}", {**_LEASED, **fields})
            for how, fields in (("ack", {}), ("nack", {}), ("extend", {"lease": 5}))
        },
    }


def schedule_questions(hub, role):
    """Routes about a schedule of the role's own, and about one of another principal."""
    path, body = f"{hub}/schedules/of-the-{role}", {"recipient": "hub", "type": "x", "every_s": 3600}
    return {
        f"{hub}/schedules/{{name}} POST": Ask("odw", "POST", path, body),
        f"{hub}/schedules/{{name}} GET": Ask("odw", "GET", path),
        f"{hub}/schedules/{{name}}/remove POST": Ask("odw", "POST", f"{path}/remove", {}),
        f"{hub}/schedules GET": Ask("odw", "GET", f"{hub}/schedules"),
    }


def webhook_questions(hub, role):
    """Routes about the webhook of the role's own mailbox. A viewer has none."""
    path, body = f"{hub}/webhooks/the-{role}", {"url": "https://example.org/"}
    route, roles = f"{hub}/webhooks/{{name}}", "odw" if role != "viewer" else "o"
    return {
        f"{hub}/webhooks GET": Ask("odw", "GET", f"{hub}/webhooks"),
        f"{route} POST": Ask(roles, "POST", path, body),
        f"{route} GET": Ask(roles, "GET", path),
        **{
            f"{route}/{how} POST": Ask(roles, "POST", f"{path}/{how}", {})
            for how in ("pause", "resume", "remove")
        },
        f"{route}/test POST": Ask(roles, "POST", f"{path}/test", {}, found=False),
    }


def topic_questions(hub, role):
    """Routes about a topic that does not exist, and about one to which the own mailbox subscribes."""
    own, nothing = f"{hub}/topics/of-the-{role}", f"{hub}/topics/nothing"
    return {
        f"{hub}/topics GET": Ask("odwv", "GET", f"{hub}/topics"),
        f"{hub}/topics/{{topic}} GET": Ask("odwv", "GET", nothing, found=False),
        f"{hub}/topics/{{topic}} POST": Ask("odw", "POST", nothing, {"type": "x"}, found=False),
        f"{hub}/topics/{{topic}}/subscribe POST": Ask("odw", "POST", f"{own}/subscribe", {}),
        f"{hub}/topics/{{topic}}/unsubscribe POST": Ask("odw", "POST", f"{own}/unsubscribe", {}),
    }


def participant_questions(hub, role):
    """Routes about participants, over MCP or MQTT."""
    return {
        f"{hub}/agents/{{name}}/mqtt POST": Ask("o", "POST", f"{hub}/agents/by-mqtt-{role}/mqtt"),
        f"{hub}/agents/{{name}}/mqtt/remove POST": Ask("o", "POST", f"{hub}/agents/by-mqtt-{role}/mqtt/remove"),
        f"{hub}/mqtt-agents GET": Ask("odwv", "GET", f"{hub}/mqtt-agents"),
        f"{hub}/participants GET": Ask("odwv", "GET", f"{hub}/participants"),
        f"{hub}/participants POST": Ask(
            "o", "POST", f"{hub}/participants", {"agent_name": "ann", "public_key": PUBLIC_KEY}
        ),
        # Nothing may be started here: it is refused for its name, behind the gate.
        f"{hub}/participants/spawn POST": Ask(
            "o", "POST", f"{hub}/participants/spawn", {"task": "x", "agent_name": "ann"}, status=409
        ),
        f"{hub}/participants/{{name}} GET": Ask("odwv", "GET", f"{hub}/participants/nobody", found=False),
        f"{hub}/participants/{{name}}/stop POST": Ask(
            "o", "POST", f"{hub}/participants/nobody/stop", {}, found=False
        ),
        f"{hub}/participants/{{name}}/keys POST": Ask(
            "o", "POST", f"{hub}/participants/nobody/keys", {"public_key": OTHER_KEY}, found=False
        ),
        f"{hub}/participants/{{name}}/keys/{{key_id}}/remove POST": Ask(
            "o", "POST", f"{hub}/participants/nobody/keys/{16 * '0'}/remove", {}, found=False
        ),
    }


def documented(page, route, answer):
    """Check an answer against the OpenAPI page."""
    path, method = route.rsplit(" ", 1)
    operation = page["paths"][path][method.lower()]
    status = str(answer.status_code)
    described = operation["responses"].get(status) or operation["responses"][f"{status[0]}XX"]
    schema = described["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": page["components"]})


def test_every_route_lets_in_exactly_the_roles_of_the_table(gateway, operator):
    page = operator.get("/openapi.json").json()
    tokens = {r: add_principal(operator, f"the-{r}", r) for r in ROLES}
    register(operator)
    held = operator.post("/api/hub/jobs/pick", json={"session": "the-worker"}).json()["job_id"]
    with gateway.client(tokens["delegator"]) as delegator:
        free, mine = (
            {
                role: register(delegator if role == "delegator" else operator, **wanted)["job_id"]
                for role in ROLES
            }
            for wanted in ({"session": "nobody"}, {})
        )
    wrong, asked = [], set()
    for role in ROLES:
        with gateway.client(tokens[role]) as client, gateway.client("") as stranger:
            for route, ask in questions(held, free, mine, role).items():
                asked.add(route)
                may = role[0] in ask.roles
                with client.stream(ask.method, ask.path, json=ask.body) as answer:
                    if (
                        "json" in answer.headers["content-type"]
                        and "ndjson" not in answer.headers["content-type"]
                    ):
                        answer.read()
                        documented(page, route, answer)
                    let_in = (200, 201) if ask.found else (404,)
                    let_in = let_in if ask.status is None else (ask.status,)
                    if (answer.status_code in let_in) != may or (not may and answer.status_code != 403):
                        wrong.append(f"{role} {route}: {answer.status_code}")
                refused = stranger.request(ask.method, ask.path, json=ask.body)
                if refused.status_code != 401 or refused.json()["reason"] != "unauthorized":
                    wrong.append(f"without a token {route}: {refused.status_code}")
    assert not wrong
    routes = {f"{path} {method.upper()}" for path, methods in page["paths"].items() for method in methods}
    assert routes - asked == {"/healthz GET", "/readyz GET", "/metrics GET"}
    with_422 = {
        p for p, methods in page["paths"].items() for op in methods.values() if "422" in op["responses"]
    }
    # Not FastAPI's own, but the <huh> of the pump.
    assert with_422 == {"/messages"}


@pytest.mark.requirement("JE-11")
def test_a_worker_comes_no_further_than_its_own(gateway, operator):
    token = add_principal(operator, "ann", "worker")
    register(operator)
    other = operator.post("/api/hub/jobs/pick", json={"session": "bo"}).json()["job_id"]
    with gateway.client(token) as ann:
        for method, path, body in (
            ("POST", "/api/hub/jobs/pick", {"session": "bo"}),
            ("POST", "/api/hub/jobs/pick", {}),
            ("POST", "/api/hub/jobs/pick", [1]),
            ("GET", f"/api/hub/jobs/{other}", None),
            ("GET", f"/api/hub/jobs/{other}/events", None),
            ("GET", "/api/hub/jobs/ffffffff", None),
            ("GET", "/api/hub/mailboxes/default/bo", None),
            ("GET", "/api/hub/mailboxes/elsewhere/ann", None),
        ):
            answer = ann.request(method, path, json=body)
            assert (answer.status_code, answer.json()["reason"]) == (403, "policy"), path
        assert ann.get("/api/hub/mailboxes/default/ann").json() == {"messages": [], "left": 0, "total": 0}
        assert ann.post("/api/hub/jobs/pick", json={"session": "ann"}).json()["reason"] == "no_match"


@pytest.mark.requirement("JE-24")
def test_a_delegator_assigns_the_jobs_that_it_registered_and_no_other(gateway, operator):
    token = add_principal(operator, "dora", "delegator")
    with gateway.client(token) as dora:
        mine, other = register(dora)["job_id"], register(operator)["job_id"]
        for _ in range(2):
            given = dora.post(f"/api/hub/jobs/{mine}/assign", json={"session": "s-1"})
            assert (given.status_code, given.json()["status"]) == (200, "running")
        refused = dora.post(f"/api/hub/jobs/{other}/assign", json={"session": "s-2"})
        assert (refused.status_code, refused.json()["reason"]) == (403, "policy")
        taken = dora.post(f"/api/hub/jobs/{mine}/assign", json={"session": "s-2"})
        assert (taken.status_code, taken.json()["reason"]) == (409, "illegal_transition")
        assert dora.get(f"/api/hub/jobs/{mine}").json()["session"] == "s-1"


@pytest.mark.requirement("JE-14")
def test_a_job_is_assigned_only_to_a_session_that_runs_and_has_no_other(gateway, operator):
    first, second = register(operator)["job_id"], register(operator)["job_id"]
    operator.post("/api/hub/sessions", json={"session": "one"})
    assert operator.post(f"/api/hub/jobs/{first}/assign", json={"session": "one"}).status_code == 200
    busy = operator.post(f"/api/hub/jobs/{second}/assign", json={"session": "one"})
    assert (busy.status_code, busy.json()["reason"]) == (409, "illegal_transition")
    assert first in busy.json()["message"]
    operator.post(f"/api/hub/jobs/{first}/cancel")
    assert operator.post(f"/api/hub/jobs/{second}/assign", json={"session": "one"}).status_code == 200
    operator.post(f"/api/hub/jobs/{second}/cancel")
    operator.post("/api/hub/sessions/one/stop", json={"mode": "hard"})
    third = register(operator)["job_id"]
    gone = operator.post(f"/api/hub/jobs/{third}/assign", json={"session": "one"})
    assert (gone.status_code, gone.json()["reason"]) == (409, "illegal_transition")
    assert operator.get(f"/api/hub/jobs/{third}").json()["status"] == "pending"


@pytest.mark.requirement("SE-07")
def test_jobs_and_sessions_are_ended_by_who_made_them_and_by_the_operator_alone(gateway, operator, read_topic):
    with (
        gateway.client(add_principal(operator, "dora", "delegator")) as dora,
        gateway.client(add_principal(operator, "dan", "delegator")) as dan,
    ):
        jobs = [register(dora)["job_id"] for _ in range(2)]
        for name in ("s-1", "s-2"):
            assert dora.post("/api/hub/sessions", json={"session": name}).status_code == 201
        for session, job, owner in (("s-1", jobs[0], dora), ("s-2", jobs[1], operator)):
            for path in (f"jobs/{job}/cancel", f"sessions/{session}/stop", f"sessions/{session}/resume"):
                refused = dan.post(f"/api/hub/{path}", json={})
                assert (refused.status_code, refused.json()["reason"]) == (403, "policy"), path
                assert owner.post(f"/api/hub/{path}", json={}).status_code == 200, path
        by_operator = register(operator)["job_id"]
        assert dora.post(f"/api/hub/jobs/{by_operator}/cancel", json={}).status_code == 403
        # A session that a pick has made is nobody's but the operator's.
        operator.post("/api/hub/jobs/pick", json={"session": "picked"})
        wait_until(lambda: operator.get("/api/hub/sessions/picked").is_success, what="the session of the pick")
        assert dora.post("/api/hub/sessions/picked/stop", json={}).status_code == 403
        assert operator.post("/api/hub/sessions/picked/stop", json={}).status_code == 200
    rows = [json.loads(record.value) for record in read_topic(10) if record.key == b"refused/http"]
    refused = [(row["principal"], row["route"].rpartition("/")[2]) for row in rows]
    assert refused == [("dan", how) for how in ("cancel", "stop", "resume")] * 2 + [
        ("dora", "cancel"),
        ("dora", "stop"),
    ]
    assert {(row["reason"], row["policy_version"]) for row in rows} == {("policy", POLICY_VERSION)}
