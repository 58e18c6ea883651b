"""Every refusal of every route of the OpenAPI page, of a running hub: its reason in the answer and in the log.

That no route comes to its handler without a decision is in test_hub_policy.py.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import httpx
import pytest

from connectors.hub.serving.policy import Action, Caller, decide
from schemas.settings.settings import Settings
from schemas.streams.principal.principals import AGENT, DELEGATOR, VIEWER, WORKER
from schemas.streams.refused.refusal import REQUEST_REFUSED
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import settled_log
from tests.connectors.doors.http_api.hub_stack import TASKS, HubStack
from trunkline_agent.wire.strict_json import decode
from trunkline_agent.wire.verdicts import REJECTED

pytestmark = pytest.mark.requirement("HH-12")

JSON = {"Content-Type": "application/json"}
OPEN = {"/healthz", "/readyz", "/metrics"}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
# With the addresses of things that are nobody's.
NOWHERE = {
    "job_id": "0" * 8,
    "name": "nobody",
    "task_id": "t-none",
    "token_id": "0" * 12,
    "realm": "default",
    "key_id": "0" * 16,
    "message_id": "m-none",
    "topic": "nothing",
    "scope": "name",
}


class Operation(NamedTuple):
    """One operation of the OpenAPI page; `action` is empty for what needs no token."""

    method: str
    route: str
    action: str
    takes_query: bool

    @property
    def url(self) -> str:
        """Its address."""
        return self.route.format(**NOWHERE)

    @property
    def name(self) -> str:
        """Return the name of the route in a refusal."""
        return f"{self.method} {self.route}"


class Row(NamedTuple):
    """Return the record of a refusal."""

    principal: str
    route: str
    reason: str
    why: str


def operations(hub: HubStack) -> list[Operation]:
    """All operations of the page."""
    paths = hub.operator.get("/openapi.json").json()["paths"]
    return [
        Operation(
            method.upper(),
            route,
            said.get("x-trunkline-action", ""),
            any(one["in"] == "query" for one in said.get("parameters", ())),
        )
        for route, methods in paths.items()
        for method, said in methods.items()
    ]


def guarded(hub: HubStack) -> list[Operation]:
    """Return the routes that need a token."""
    found = [one for one in operations(hub) if one.action]
    assert {one.route for one in operations(hub)} - {one.route for one in found} == OPEN
    assert {one.action for one in found} == set(Action)
    return found


def refused_rows(settings: Settings) -> Counter[Row]:
    """The refusals of the log that the fold gives the verdict and the reason that they say themselves."""
    rows: Counter[Row] = Counter()
    for one in settled_log(settings):
        if one.type == REQUEST_REFUSED:
            body, _ = decode(one.value)
            assert (one.stream, one.verdict, one.reason) == ("refused/http", REJECTED, body["reason"])
            assert (one.principal, body["suppressed"]) == (f"http/{body['principal']}", 0)
            rows[Row(body["principal"], body["route"], body["reason"], body["why"])] += 1
    return rows


def check_rows(hub: HubStack, expected: Counter[Row], principals: set[str]) -> None:
    """That the log has exactly these refusals of these principals. It gets them soon after the answer."""

    def found() -> Counter[Row]:
        rows = refused_rows(hub.settings)
        return Counter({row: count for row, count in rows.items() if row.principal in principals})

    wait_until(lambda: found().total() >= expected.total(), what=f"{expected.total()} refusals in the log")
    rows = found()
    assert rows - expected == Counter() == expected - rows


def refusal(answer: httpx.Response, status: int, principal: str, operation: Operation) -> Row:
    """The row that must be in the log for an answer, which is a refusal with this status."""
    assert answer.status_code == status, (operation.name, principal, answer.text)
    assert set(answer.json()) == {"reason", "message"}
    assert answer.json()["message"]
    return Row(principal, operation.name, answer.json()["reason"], answer.json()["message"])


def ask(client: httpx.Client, operation: Operation) -> httpx.Response:
    """One request about nothing that is there."""
    body = {"session": "nobody", "subscriber": "nobody"} if operation.method == "POST" else None
    return client.request(operation.method, operation.url, json=body)


@pytest.mark.requirement("HH-09")
def test_each_route_refuses_strangers_with_a_reason_that_the_log_has_too(hub):
    stranger, unknown = hub.client(""), hub.client("00000000-0000-4000-8000-000000000000")
    expected: Counter[Row] = Counter()
    for one in guarded(hub):
        for client in (stranger, unknown):
            expected[refusal(ask(client, one), 401, "anonymous", one)] += 1
    assert {row.reason for row in expected} == {"unauthorized"}
    assert {row.route for row in expected} == {one.name for one in guarded(hub)}
    check_rows(hub, expected, {"anonymous"})


@pytest.mark.requirement("HH-09")
def test_each_route_refuses_whoever_has_no_right_with_a_reason_that_the_log_has_too(hub):
    task = hub.submit("lazy")
    callers = {AGENT: ("lazy", task.token)} | {
        role: hub.principal(role) for role in (DELEGATOR, WORKER, VIEWER)
    }
    expected: Counter[Row] = Counter()
    refused: dict[str, set[str]] = {role: set() for role in callers}
    for role, (name, token) in callers.items():
        client = hub.client(token)
        for one in guarded(hub):
            # A schedule's free name belongs to whoever may set schedules.
            is_free = one.action == Action.SCHEDULE_SET and role != VIEWER
            caller = Caller(name, role, task.id if role == AGENT else None)
            if not is_free and not decide(caller, Action(one.action)).allowed:
                expected[refusal(ask(client, one), 403, name, one)] += 1
                refused[role].add(one.action)
    assert {row.reason for row in expected} == {"policy"}
    # Each of them may not do something, and only topics and agents are shown to all of them.
    assert all(refused.values())
    assert set.union(*refused.values()) == set(Action) - {Action.TOPIC_READ, Action.AGENT_READ}
    check_rows(hub, expected, {name for name, _ in callers.values()})
    hub.operator.post(f"{TASKS}/{task.id}/cancel", json={})


def test_each_route_refuses_what_is_malformed_or_too_large_with_a_reason_that_the_log_has_too(hub):
    expected: Counter[Row] = Counter()
    too_large = b" " * (hub.settings.limits.payload_bytes + 1)
    # The record of a job's event has the bytes of the request, whatever they are: test_job_events_over_http.py.
    posts = [one for one in guarded(hub) if one.method == "POST" and one.action != Action.JOB_REPORT]
    for one in posts:
        for body, status in ((b"{", 400), (b'{"unknown-field": 1}', 400), (too_large, 413)):
            headers = JSON if one.route != "/messages" else {"Content-Type": "application/xml"}
            answer = hub.operator.post(one.url, content=body, headers=headers)
            expected[refusal(answer, status, "operator", one)] += 1
    asked = [one for one in guarded(hub) if one.takes_query]
    for one in asked:
        answer = hub.operator.request(one.method, one.url, params={"unknown-parameter": "1"})
        expected[refusal(answer, 400, "operator", one)] += 1
    assert {row.reason for row in expected} == {"malformed", "too_large"}
    assert not [row for row in expected if "unknown-" in row.why], "nothing of it is repeated"
    assert len(posts) >= 15 and len(asked) >= 8
    check_rows(hub, expected, {"operator"})


def test_each_path_answers_405_to_each_other_method_and_names_its_own(hub):
    by_route: dict[str, set[str]] = {}
    for one in operations(hub):
        by_route.setdefault(one.route, set()).add(one.method)
    patterns = {re.compile(re.sub(r"\{\w+\}", "[^/]+", route)): own for route, own in by_route.items()}
    for route, own in by_route.items():
        url = route.format(**NOWHERE)
        taken = set.union(*(methods for pattern, methods in patterns.items() if pattern.fullmatch(url)))
        for method in sorted(set(METHODS) - taken):
            answer = hub.operator.request(method, url)
            assert (answer.status_code, answer.json()["reason"]) == (405, "method_not_allowed"), (method, url)
            # HEAD goes with GET, and is in no document.
            assert set(answer.headers["Allow"].split(", ")) - {"HEAD"} == own, (method, url)
            assert set(answer.json()) == {"reason", "message"}
