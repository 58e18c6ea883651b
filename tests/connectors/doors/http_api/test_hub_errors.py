"""Refusals of a real gateway, long bodies, and requests that are repeated at another gateway."""

from __future__ import annotations

import json

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_post_routes import ROUTES, fresh
from tests.connectors.doors.http_api.hub_stack import MESSAGES, TASKS, TOKENS, one_of

JSON = {"Content-Type": "application/json"}
MIB = 1024 * 1024


def said(answer):
    """Status and reason of an error, which is of the one form."""
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"reason", "message"}, answer.text
    return answer.status_code, answer.json()["reason"]


def page(hub):
    """The OpenAPI page."""
    return hub.operator.get("/openapi.json").json()


@pytest.mark.requirement("HH-12")
def test_nearly_a_mebibyte_is_taken_and_a_byte_more_than_one_is_too_large(hub):
    name, token = hub.principal("worker")
    reader = hub.client(token, 1)
    # The record of a message holds more than its body, and what JSON escapes grows in it.
    for filler in ("x", "ü", '"', "\\"):
        envelope = {"recipient": name, "type": "x", "payload": ""}
        whole = MIB - len(json.dumps(envelope))
        unit = len(json.dumps(filler, ensure_ascii=False).encode()) - 2
        envelope["payload"] = filler * (whole // unit) + "x" * (whole % unit)
        body = json.dumps(envelope, ensure_ascii=False).encode()
        assert len(body) == MIB
        assert hub.operator.post(MESSAGES, content=body, headers=JSON).status_code == 200, filler
        assert one_of(reader.get(MESSAGES).json()["messages"])["payload"] == envelope["payload"]
        assert said(hub.operator.post(MESSAGES, content=body + b" ", headers=JSON)) == (
            413,
            "too_large",
        )
    assert reader.get(MESSAGES).json()["messages"] == []


# Fields about the answer's own record, which differs for a repeated request, and about the gateway.
_OF_THE_ANSWER = ("position", "verdict", "url")


def _told(answer):
    return {key: value for key, value in answer.json().items() if key not in _OF_THE_ANSWER}


@pytest.mark.requirement("HH-12")
@pytest.mark.parametrize("path", ROUTES)
def test_the_same_again_at_another_gateway_has_the_same_answer_and_other_content_is_a_conflict(hub, path):
    address, body, other = ROUTES[path]
    url, key = address(hub), {"Idempotency-Key": fresh("key")}
    first = hub.operator.post(url, json=body, headers=key)
    assert first.is_success, first.text
    for client in (hub.operator, hub.other):
        again = client.post(url, json=body, headers=key)
        assert (again.status_code, _told(again)) == (first.status_code, _told(first))
        assert again.headers["Trunkline-Verdict"] == "duplicate"
        if other is not None:
            assert said(client.post(url, json=other, headers=key)) == (409, "seq_conflict")


@pytest.mark.requirement("HH-12")
def test_while_kafka_is_away_the_hub_answers_503_and_goes_on_afterwards(hub, kafka_broker):
    task = hub.submit("idle")
    key = {"Idempotency-Key": fresh("key")}
    with kafka_broker.away():
        for client in (hub.operator, hub.other):
            wait_until(lambda client=client: client.get("/readyz").status_code == 503, what="not ready")
        for path, body in (
            (TASKS, {"agent_name": "idle", "description": "x"}),
            (MESSAGES, {"recipient": "hub", "type": "x"}),
            (f"{TASKS}/{task.id}/complete", {}),
            (f"{TASKS}/{task.id}/fail", {"error": "x"}),
            (f"{TASKS}/{task.id}/cancel", {}),
            (f"{TOKENS}/{task.answer['task']['token_id']}/revoke", {}),
        ):
            answer = hub.operator.post(path, json=body, headers=key)
            assert said(answer) == (503, "unreachable"), path
            assert int(answer.headers["Retry-After"]) >= 1
        for path, body in (
            ("started", {"pump": "p1"}),
            ("lease", {"pump": "p1", "wants": {}, "free": 1}),
            ("settle", {"pump": "p1", "done": []}),
        ):
            assert said(hub.operator.post(f"/api/hub/pump/{path}", json=body)) == (503, "unreachable"), path
        xml = '<message xmlns="urn:trunkline:envelope:1"><to>hub</to><x xmlns="urn:x"></x></message>'
        answer = hub.operator.post("/messages", content=xml, headers={"Content-Type": "application/xml"})
        assert said(answer) == (503, "unreachable")
        assert hub.task(task.id)["status"] == "running"
        assert hub.client("nobody").get(TASKS).status_code == 401
    for client in (hub.operator, hub.other):
        wait_until(lambda client=client: client.get("/readyz").status_code == 200, 30, "ready again")
    done = hub.operator.post(f"{TASKS}/{task.id}/complete", json={}, headers=key)
    assert (done.status_code, done.json()["status"]) == (200, "completed")
    hub.wait_recycled(task.id)
