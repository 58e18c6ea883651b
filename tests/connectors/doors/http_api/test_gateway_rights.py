"""The routes of a running gateway that are no operations, by each role: who gets in, and documented answers."""

from __future__ import annotations

import json
from typing import NamedTuple

import jsonschema
import pytest

from schemas.streams.refused.refusal import POLICY_VERSION
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import add_principal, register
from tests.connectors.doors.http_api.test_contracts import BY_HAND

ROLES = ("operator", "delegator", "worker", "viewer")


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


def questions(held, mine, role):
    """One question for each route that is no declared operation. The matrix asks the declared ones."""
    hub, own = "/api/hub", f"the-{role}"
    box = f"{hub}/mailboxes/default/{own}/messages/m1/blob"
    reported = held if role == "worker" else mine[role]
    return {
        f"{hub}/jobs/{{job_id}}/events GET": Ask("odwv", "GET", f"{hub}/jobs/{held}/events"),
        f"{hub}/jobs/{{job_id}}/events POST": Ask(
            "odw", "POST", f"{hub}/jobs/{reported}/events", {}, status=400
        ),
        f"{hub}/events GET": Ask("odv", "GET", f"{hub}/events"),
        f"{hub}/verdicts GET": Ask("o", "GET", f"{hub}/verdicts"),
        f"{hub}/messages/events GET": Ask("odw", "GET", f"{hub}/messages/events"),
        f"{hub}/blobs PUT": Ask("odw", "PUT", f"{hub}/blobs", {}),
        f"{hub}/mailboxes/{{realm}}/{{name}}/messages/{{message_id}}/blob GET": Ask(
            "odw" if role != "viewer" else "o", "GET", box, found=False
        ),
        # JSON is no XML, behind the gate.
        "/messages POST": Ask("odw", "POST", "/messages", {}, status=415),
        f"{hub}/pump/started POST": Ask("o", "POST", f"{hub}/pump/started", {"pump": own}),
        f"{hub}/pump/lease POST": Ask("o", "POST", f"{hub}/pump/lease", {"pump": own, "wants": {}, "free": 1}),
        f"{hub}/pump/settle POST": Ask("o", "POST", f"{hub}/pump/settle", {"pump": own, "done": []}),
        f"{hub}/pump/history POST": Ask(
            "o", "POST", f"{hub}/pump/history", {"listener": "nobody", "thread": "nothing"}
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


def test_each_route_by_hand_lets_in_exactly_the_roles_of_the_table(gateway, operator):
    page = operator.get("/openapi.json").json()
    tokens = {r: add_principal(operator, f"the-{r}", r) for r in ROLES}
    register(operator)
    held = operator.post("/api/hub/jobs/pick", json={"session": "the-worker"}).json()["job_id"]
    with gateway.client(tokens["delegator"]) as delegator:
        mine = {role: register(delegator if role == "delegator" else operator)["job_id"] for role in ROLES}
    wrong, asked = [], set()
    for role in ROLES:
        with gateway.client(tokens[role]) as client, gateway.client("") as stranger:
            for route, ask in questions(held, mine, role).items():
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
    declared = {" ".join(reversed(one.split(" "))) for one in BY_HAND} & routes
    assert declared - asked == {"/healthz GET", "/readyz GET", "/metrics GET"}
    with_422 = {
        p for p, methods in page["paths"].items() for op in methods.values() if "422" in op["responses"]
    }
    # Not FastAPI's own, but the <huh> of the pump.
    assert with_422 == {"/messages"}


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
