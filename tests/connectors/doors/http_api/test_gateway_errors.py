"""Refusals before anything is appended: sizes, forms, names, routes, and the form of the errors."""

from __future__ import annotations

import json
import socket
from collections import Counter

import pytest

from connectors.hub.serving.strict_request import READ_LIMIT_BYTES
from connectors.programs.gateway_program.application import Door
from connectors.programs.gateway_program.program import bound_socket
from tests.broker_processes import LOOPBACK, free_port
from tests.connectors.doors.http_api.hub_access import JOBS, SESSIONS


@pytest.mark.requirement("CM-02")
def test_bodies_that_break_the_rules_are_refused_with_a_row_that_says_why(
    backbone_settings, operator, read_topic
):
    limit = backbone_settings.limits.payload_bytes
    cases = [
        (b'{"description":"a","description":"b"}', 400, "malformed"),
        (b'{"description":NaN}', 400, "malformed"),
        (b'{"description":"\\ud800"}', 400, "malformed"),
        (b'{"description":"\xff"}', 400, "malformed"),
        (b'{"description":"x","broker":{"port":9223372036854775808}}', 400, "malformed"),
        (b"[" * 70 + b"]" * 70, 400, "malformed"),
        (b"", 400, "malformed"),
        (b"[]", 400, "malformed"),
        (b'"x"', 400, "malformed"),
        (b'{"description":1}', 400, "malformed"),
        (b'{"description":"x","descripton":"y"}', 400, "malformed"),
        (b'{"description":"bell \\u0007"}', 400, "malformed"),
        (b'{"description":"' + b"x" * 4001 + b'"}', 400, "malformed"),
        (b'{"description":"x","broker":{"port":"1883"}}', 400, "malformed"),
        (b'{"description":"x","session":"../x"}', 400, "malformed"),
        (b'{"description":"x"}' + b" " * limit, 413, "too_large"),
        (b"not json at all" * limit, 413, "too_large"),
    ]
    for body, status, reason in cases:
        answer = operator.post(JOBS, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["reason"]) == (status, reason), body[:60]
        assert set(answer.json()) == {"reason", "message"}
    as_chunks = operator.post(
        JOBS, content=(b" " * 65536 for _ in range(10)), headers={"Content-Type": "application/json"}
    )
    assert as_chunks.status_code == 413
    as_form = operator.post(JOBS, data={"description": "x"})
    assert (as_form.status_code, as_form.json()["reason"]) == (400, "malformed")
    beyond = operator.post(JOBS, content=b" " * (READ_LIMIT_BYTES + 1))
    assert (beyond.status_code, beyond.json()["reason"]) == (413, "too_large")
    # Of each reason the first five, then one every ten seconds. A body over 16 MiB has no row.
    rows = read_topic(8)
    assert {record.key for record in rows} == {b"refused/http"}
    told = [json.loads(record.value) for record in rows]
    counts = Counter(one["reason"] for one in told)
    assert counts["too_large"] == 3 and 5 <= counts["malformed"] <= 8
    assert {(one["principal"], one["route"]) for one in told} == {("operator", f"POST {JOBS}")}


def test_what_is_no_route_is_answered_in_the_same_form(gateway, operator):
    for method, path, status, reason in (
        ("GET", "/", 404, "not_found"),
        ("GET", "/api/hub/nothing", 404, "not_found"),
        ("GET", f"{JOBS}/", 404, "not_found"),
        ("DELETE", JOBS, 405, "method_not_allowed"),
        ("GET", "/redoc", 404, "not_found"),
        ("GET", "/docs/nothing.js", 404, "not_found"),
        ("GET", f"{JOBS}/00000000", 404, "not_found"),
        ("GET", f"{JOBS}/00000000/events", 404, "not_found"),
        ("GET", f"{SESSIONS}/nobody", 404, "not_found"),
        ("GET", f"{JOBS}/NOT-AN-ID", 400, "malformed"),
    ):
        answer = operator.request(method, path)
        assert (answer.status_code, answer.json()["reason"]) == (status, reason), path
    with gateway.client("") as stranger:
        assert stranger.get("/healthz").json() == {"status": "ok"}
        ready = stranger.get("/readyz").json()
        assert ready["status"] == "ready" and set(ready["lag"]) == {"0", "1", "2", "3"}
        assert stranger.get("/nothing").status_code == 404


def test_the_listening_socket_is_one_on_which_answers_do_not_wait_for_acknowledgements():
    with bound_socket(Door("hub", None, LOOPBACK, free_port(), "gateway.port")) as listener:
        # asyncio sets TCP_NODELAY for connections of a socket that names its protocol, and only for those.
        assert listener.proto == socket.IPPROTO_TCP
