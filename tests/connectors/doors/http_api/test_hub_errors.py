"""Refusals of the hub, the form of its errors, and repeated requests, for each POST route."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as checks
from hypothesis import strategies as st

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_post_routes import OTHER_POSTS, PRINCIPALS, ROUTES, fresh
from tests.connectors.doors.http_api.hub_stack import AGENTS, AUDIT, CONTAINERS, MESSAGES, TASKS, TOKENS, one_of

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


def post_paths(hub):
    """The POST routes of the OpenAPI page."""
    return {path for path, methods in page(hub)["paths"].items() if "post" in methods}


# Fields about the answer's own record, which differs for a repeated request, and about the gateway.
_OF_THE_ANSWER = ("position", "verdict", "url")


def _told(answer):
    return {key: value for key, value in answer.json().items() if key not in _OF_THE_ANSWER}


@pytest.mark.requirement("HH-12")
def test_every_post_route_of_the_openapi_page_takes_an_idempotency_key(hub):
    assert post_paths(hub) == set(ROUTES) | OTHER_POSTS
    for path in ROUTES:
        parameters = page(hub)["paths"][path]["post"]["parameters"]
        one_of([p for p in parameters if (p["in"], p["name"]) == ("header", "Idempotency-Key")])


@pytest.mark.requirement("HH-12")
@pytest.mark.parametrize("path", ROUTES)
def test_the_same_again_under_its_key_has_the_same_answer_and_other_content_is_a_conflict(hub, path):
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
    for bad in ("", "a b", "é".encode(), "x" * 256):
        assert said(hub.operator.post(url, json=body, headers={"Idempotency-Key": bad})) == (400, "malformed")


HOSTILE = {
    "cut off": b'{"description": "x"',
    "nothing": b" ",
    "an array": b"[]",
    "a text": b'"x"',
    "a number": b"1",
    "NaN": b'{"description": NaN}',
    "Infinity": b'{"description": -Infinity}',
    "too large for a float": b'{"description": 1e999}',
    "too large for 64 bits": b'{"description": 9223372036854775808}',
    "a number of a million digits": b'{"description": ' + b"9" * 1_000_000 + b"}",
    "a lone surrogate": b'{"description": "\\ud800"}',
    "a lone surrogate as a key": b'{"\\udfff": 1}',
    "not UTF-8": b'{"description": "\xff\xfe"}',
    "UTF-16": '{"description": "x"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"description": "x"}',
    "a raw control character": b'{"description": "a\x01b"}',
    "a raw zero byte": b'{"description": "x"}\x00',
    "a key twice": b'{"description": "x", "description": "y"}',
    "an unknown key": b'{"canary-key": 1}',
    "70 deep": b'{"description": ' + b"[" * 70 + b"]" * 70 + b"}",
    "100,000 deep": b"[" * 100_000,
    "100,000 objects deep": b'{"a":' * 100_000,
    "two documents": b"{}{}",
}
# With the addresses of things that need not be there: the body is looked at first.
ADDRESSES = {
    "job_id": "00000000",
    "name": "nobody",
    "task_id": "t-none",
    "token_id": "0" * 12,
    "key_id": "0" * 16,
    "realm": "default",
    "scope": "name",
    "topic": "nothing",
    "message_id": "m-none",
}


@pytest.mark.requirement("HH-12")
def test_a_hostile_body_is_malformed_on_every_route_and_is_not_repeated(hub):
    for path in ROUTES:
        url = path.format(**ADDRESSES)
        for name, body in HOSTILE.items():
            if name == "nothing" and page_takes_no_body(hub, path):
                continue
            answer = hub.operator.post(url, content=body, headers=JSON)
            assert said(answer) == (400, "malformed"), (path, name, answer.text)
            assert "canary" not in answer.text
    assert hub.operator.get("/readyz").status_code == 200


def page_takes_no_body(hub, path):
    """True if a route may be asked without a body."""
    return not page(hub)["paths"][path]["post"].get("requestBody", {}).get("required", False)


@pytest.mark.requirement("HH-12")
def test_control_characters_are_refused_where_people_read_and_kept_where_programs_do(hub):
    for path, body in (
        (TASKS, {"agent_name": "idle", "description": "bell \u0007"}),
        (TASKS, {"agent_name": "idle", "description": "zero \u0000"}),
        (TASKS, {"agent_name": "idle\n", "description": "x"}),
        (MESSAGES, {"recipient": "hub\u0000", "type": "x"}),
        (MESSAGES, {"recipient": "hub", "type": "x\u001b[2J"}),
        (f"{TASKS}/t-none/fail", {"error": "\u009b"}),
        (f"{TASKS}/t-none/cancel", {"reason": "\u0085\u0000"}),
        (TASKS, {"agent_name": "idle", "description": "x" * 32_001}),
        (MESSAGES, {"recipient": "h" * 129, "type": "x"}),
        (MESSAGES, {"recipient": "../hub", "type": "x"}),
        (MESSAGES, {"recipient": "hub", "type": "x" * 129}),
        (TASKS, {"agent_name": ["idle"], "description": "x"}),
        (TASKS, {"agent_name": "idle", "description": 1}),
    ):
        assert said(hub.operator.post(path, json=body)) == (400, "malformed"), body
    kept = {"recipient": "hub", "type": "x", "payload": "\u0000\u001b"}
    assert hub.operator.post(MESSAGES, json=kept).status_code == 200


@pytest.mark.requirement("HH-12")
def test_nearly_a_mebibyte_is_taken_and_a_byte_more_than_one_is_too_large_on_every_route(hub):
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
    for path in ROUTES:
        answer = hub.operator.post(path.format(**ADDRESSES), content=b" " * (MIB + 1), headers=JSON)
        assert said(answer) == (413, "too_large"), path
    assert reader.get(MESSAGES).json()["messages"] == []


@pytest.mark.requirement("HH-12")
def test_without_a_good_token_every_route_answers_401(hub):
    clients = [
        hub.client(token) for token in ("", "nobody", "00000000-0000-4000-8000-000000000000", "x" * 5000)
    ]
    for path, methods in page(hub)["paths"].items():
        for method in methods:
            if path in ("/healthz", "/readyz", "/metrics"):
                continue
            for client in clients:
                answer = client.request(method.upper(), re.sub(r"\{\w+\}", "x", path))
                assert said(answer) == (401, "unauthorized"), (method, path)
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    for header in ("", "Bearer", "Basic b3BlcmF0b3I6", f"Basic {hub.gateways[0].operator_token}"):
        answer = hub.client("").get(TASKS, headers={"Authorization": header})
        assert said(answer) == (401, "unauthorized")


@pytest.mark.requirement("HH-12")
def test_what_is_not_there_is_404_and_what_is_no_name_is_400(hub):
    for method, path, body in (
        ("GET", f"{TASKS}/t-none", None),
        ("POST", f"{TASKS}/t-none/complete", {}),
        ("POST", f"{TASKS}/t-none/fail", {"error": "x"}),
        ("POST", f"{TASKS}/t-none/cancel", {}),
        ("GET", f"{AGENTS}/nobody", None),
        ("POST", f"{TOKENS}/{'0' * 12}/revoke", {}),
        ("POST", TASKS, {"agent_name": "nobody", "description": "x"}),
        ("POST", MESSAGES, {"recipient": "nobody", "type": "x"}),
        ("GET", "/api/hub/nothing", None),
        ("POST", "/api/hub/message", {}),
    ):
        status, reason = said(hub.operator.request(method, path, json=body))
        assert (status, reason in ("not_found", "unknown_stream", "unknown_recipient")) == (404, True), path
    for method, path in (
        ("GET", f"{TASKS}/-x"),
        ("GET", f"{TASKS}/a%20b"),
        ("POST", f"{TASKS}/{'x' * 129}/cancel"),
        ("POST", f"{TOKENS}/0123456789AB/revoke"),
        ("GET", f"{TASKS}?status=RUNNING"),
        ("GET", f"{TASKS}?limit=0"),
        ("GET", f"{TASKS}?unknown=1"),
        ("GET", f"{AUDIT}?limit=x"),
        ("GET", f"{CONTAINERS}?limit={'9' * 30}"),
    ):
        assert said(hub.operator.request(method, path)) == (400, "malformed"), path
    assert said(hub.operator.delete(TASKS))[0] == 405


_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
_LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT
)
_ANY = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=6
)
_FIELDS = ("agent_name", "description", "recipient", "type", "payload", "result", "error", "reason")
_BODIES = st.dictionaries(st.sampled_from(_FIELDS), st.sampled_from(["hub", "x"]) | _ANY, max_size=4)
_RECIPIENTS = st.sampled_from(["hub", "idle", "nobody"])
_ENVELOPES = st.fixed_dictionaries({"recipient": _RECIPIENTS, "type": _TEXT, "payload": _ANY})
_ASKED = st.tuples(st.sampled_from(sorted(set(ROUTES) - {PRINCIPALS})), _BODIES | _ANY)


@pytest.mark.requirement("HH-11")
@checks(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_ASKED | st.tuples(st.just(MESSAGES), _ENVELOPES))
def test_no_body_makes_a_route_fail_and_each_answer_is_as_documented(hub, asked):
    path, body = asked
    answer = hub.operator.post(path.format(**ADDRESSES), json=body)
    assert answer.status_code in (200, 201, 400, 403, 404, 409), answer.text
    _check_documented(page(hub), path, "post", answer)


def _check_documented(openapi, path, method, answer):
    described = openapi["paths"][path][method]["responses"]
    status = str(answer.status_code)
    found = described.get(status) or described[f"{status[0]}XX"]
    schema = found["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": openapi["components"]})


@pytest.mark.requirement("HH-11")
def test_what_the_hub_shows_is_as_its_openapi_page_says(hub):
    task = hub.submit("idle")
    hub.operator.post(MESSAGES, json={"recipient": "operator", "type": "x", "payload": {"a": 1}})
    openapi = page(hub)
    assert openapi["openapi"].startswith("3.")
    for path in (
        TASKS,
        f"{TASKS}/{{task_id}}",
        AGENTS,
        f"{AGENTS}/{{name}}",
        CONTAINERS,
        TOKENS,
        AUDIT,
        MESSAGES,
    ):
        answer = hub.operator.get(path.format(task_id=task.id, name="idle"))
        assert answer.status_code == 200
        _check_documented(openapi, path, "get", answer)
    hub.operator.post(f"{TASKS}/{task.id}/cancel", json={})


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
