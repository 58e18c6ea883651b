"""While Kafka hangs or is gone: every route of the OpenAPI page, asked by the operator with a valid body.

The questions are made from the page, so a new route is among them by itself: what its action only reads is
answered from the live view, what it changes with 503 (HH-12).
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from tests.broker_processes import BrokerProcess, make_kafka, wait_until
from tests.connectors.doors.http_api.hub_access import accepted_of_operator, sample
from tests.connectors.doors.http_api.hub_post_routes import LEAST, MADE, OTHER_POSTS, new_schedule, new_webhook
from tests.connectors.doors.http_api.hub_stack import (
    AGENTS,
    CONTAINERS,
    MESSAGES,
    TASKS,
    HubStack,
    hub_settings,
    one_of,
)
from trunkline_agent.mcp.signing import new_key_pair
from trunkline_agent.wire.verdicts import DUPLICATE

pytestmark = [pytest.mark.requirement("HH-12"), pytest.mark.kafka]

JOBS, SESSIONS, PRINCIPALS = "/api/hub/jobs", "/api/hub/sessions", "/api/hub/principals"
PARTICIPANTS = "/api/hub/participants"
SETTLE_S = 2.0
# A change may wait once for where the log ends and once for its record; the rest is for a busy machine.
IN_TIME_S = 2 * SETTLE_S + 2.0
AT_ONCE_S = SETTLE_S - 0.5
READY_S = 60.0
HANGS, GONE = "hangs", "gone"
# No thread has a known id. The drain, asked at the same moment, takes the messages that could be leased or
# marked as read.
# The name of a blob is its key, and each upload keeps it for longer.
NOT_ASKED = {"/api/hub/threads/{name}", "/api/hub/blobs"}
NOT_ASKED |= {f"{MESSAGES}/{how}" for how in ("read", "ack", "nack", "extend")}
# Fields about the answer's own record, and about other waiting messages, differ the second time.
OF_THE_ANSWER = ("position", "verdict", "left", "cleared")
# A broadcast that is repeated reaches also who has come meanwhile.
BROADCAST = "/api/hub/messages/broadcast"
COUNT = f"{MESSAGES}/count"
_numbers = itertools.count(1)


class Question(NamedTuple):
    """One operation of the page, with what is to be asked for it. `action` None: it needs no token."""

    method: str
    route: str
    action: str | None
    media_type: str
    url: str
    body: Any
    key: str

    @property
    def changes(self) -> bool:
        """True if it changes anything: each action but to read, list, follow, or count."""
        is_reading = self.action is None or self.action.endswith((".read", ".list")) or self.route == COUNT
        return not is_reading and not self.is_endless

    @property
    def is_endless(self) -> bool:
        """True if its answer does not end."""
        return self.media_type.rpartition("/")[2] != "json" and self.action is not None


class Told(NamedTuple):
    """An answer, and how long it took."""

    answer: httpx.Response
    seconds: float


class Outage(NamedTuple):
    """The requests and answers from before an outage until after it, by their index in `asked`."""

    asked: list[Question]
    to_drain: str
    before: dict[int, Any]
    at_first: dict[int, Told]
    later: dict[int, Told]
    streams: dict[str, Told]
    refused: dict[str, tuple[int, str]]
    empty_drain: Told
    open_routes: dict[str, int]
    after: dict[int, Told]
    again: dict[int, Told]
    accepted: int


def things(hub: HubStack, route: str, own: str) -> dict[str, str]:
    """The things that a route's path names, made for one request."""
    collection = route.split("/")[3]
    if collection == "jobs" and route != JOBS:
        job = hub.operator.post(JOBS, json={"description": "x", "session": own})
        return {"job_id": job.json()["job_id"]}
    if "{" not in route:
        return {}
    if collection == "sessions":
        assert hub.operator.post(SESSIONS, json={"session": own}).status_code == 201
        if route.endswith("/resume"):
            assert hub.operator.post(f"{SESSIONS}/{own}/stop", json={}).status_code == 200
        return {"name": own}
    if collection == "principals":
        return {"name": hub.principal("viewer")[0]}
    if collection == "participants":
        _, public_key = new_key_pair()
        joined = hub.operator.post(PARTICIPANTS, json={"agent_name": own, "public_key": public_key})
        return {"name": own, "key_id": joined.json()["keys"][0]["key_id"]}
    if route.endswith("/mqtt") or collection == "limits":
        return {"name": own, "scope": "name"}
    if route.endswith("/mqtt/remove"):
        return {"name": hub.operator.post(f"/api/hub/agents/{own}/mqtt").json()["agent_name"]}
    if route.endswith("/clear"):
        # Not the operator's, because the drain may come after the clearing when Kafka wakes up.
        return {"realm": "default", "name": own}
    if (made := MADE.get(route.rpartition("/")[2])) is not None:
        return made(hub)
    if collection == "topics":
        if not route.endswith("/subscribe"):
            # The hub reads its copies itself, so the drain gets none of them.
            to = "operator" if route.endswith("/unsubscribe") else "hub"
            hub.operator.post(f"/api/hub/topics/{own}/subscribe", json={"subscriber": to}).raise_for_status()
        return {"topic": own}
    if collection == "schedules":
        return {"name": new_schedule(hub).rpartition("/")[2]}
    if collection == "webhooks":
        return {"name": new_webhook(hub, *["/pause"] * route.endswith("/resume")).rpartition("/")[2]}
    if collection in ("tasks", "tokens"):
        task = hub.submit("idle")
        return {"task_id": task.id, "token_id": task.answer["task"]["token_id"]}
    return {"realm": "default", "name": {"agents": "idle"}.get(collection, "operator")}


def is_asked(route: str, method: str) -> bool:
    """False for routes without an idempotency key, which test_hub_errors.py tests, and those of `NOT_ASKED`."""
    return route not in NOT_ASKED and not (method == "post" and route in OTHER_POSTS)


def questions(hub: HubStack, to_drain: str) -> list[Question]:
    """One for each operation of the page; what they are about is there when this returns. `to_drain`: payload
    of a message to the operator.
    """
    page = hub.operator.get("/openapi.json").json()
    found = []
    for route, methods in page["paths"].items():
        for method, operation in methods.items():
            if not is_asked(route, method):
                continue
            own = f"down-{next(_numbers)}"
            names = {"session": own, "principal": own, "agent_name": "idle", "recipient": "hub"}
            if route.startswith(PARTICIPANTS):
                names |= {"agent_name": own, "public_key": new_key_pair()[1]}
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            (answer,) = [said for status, said in operation["responses"].items() if status in ("200", "201")]
            action = operation.get("x-trunkline-action")
            found.append(
                Question(
                    method.upper(),
                    route,
                    action,
                    next(iter(answer["content"])),
                    route.format(**things(hub, route, own)) if action else route,
                    None if body is None else LEAST.get(route) or sample(page, body["schema"], names),
                    own,
                )
            )
    envelope = {"recipient": "operator", "type": "x", "payload": to_drain}
    assert hub.operator.post(MESSAGES, json=envelope).status_code == 200

    def is_quiet() -> bool:
        shown = hub.operator.get(CONTAINERS, params={"limit": 1000}).json()["containers"]
        return all(one["state"] in ("monitoring", "recycled") for one in shown)

    wait_until(is_quiet, what="all agents run")
    return found


def ask(client: httpx.Client, question: Question) -> Told:
    """Ask, under the question's key."""
    begun = time.monotonic()
    headers = {"Idempotency-Key": question.key, "X-Request-ID": question.key}
    answer = client.request(question.method, question.url, json=question.body, headers=headers)
    return Told(answer, time.monotonic() - begun)


def ask_until_done(client: httpx.Client, question: Question) -> Told:
    """Ask until it is no more 503, as clients are told to: just back, Kafka may be away for a moment again."""
    deadline = time.monotonic() + READY_S
    while (told := ask(client, question)).answer.status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.2)
    return told


def ask_each(
    client: httpx.Client,
    asked: list[Question],
    only: Callable[[Question], bool],
    how: Callable[[httpx.Client, Question], Told] = ask,
) -> dict[int, Told]:
    """Ask one after another what ends and is wanted."""
    wanted = {n: one for n, one in enumerate(asked) if not one.is_endless and one.action and only(one)}
    return {n: how(client, one) for n, one in wanted.items()}


def ask_all_at_once(client: httpx.Client, asked: list[Question]) -> dict[int, Told]:
    """Ask all that ends: what changes something each in a thread of its own, and meanwhile what reads, of which
    each is to be answered at once, and on a busy machine none would be if all were asked at one moment.
    """
    changes = {n: one for n, one in enumerate(asked) if one.changes and not one.is_endless}
    with ThreadPoolExecutor(len(changes)) as pool:
        waiting = {n: pool.submit(ask, client, one) for n, one in changes.items()}
        reads = ask_each(client, asked, lambda one: not one.changes)
        return reads | {n: told.result() for n, told in waiting.items()}


def first_of(client: httpx.Client, question: Question) -> Told:
    """The beginning of an answer that does not end."""
    begun = time.monotonic()
    with client.stream(question.method, question.url) as answer:
        line = next(answer.iter_lines())
        return Told(httpx.Response(answer.status_code, text=line), time.monotonic() - begun)


def refusals(hub: HubStack, viewer: httpx.Client) -> dict[str, tuple[int, str]]:
    """Requests that are refused with and without Kafka: status and reason."""
    stranger, operator = hub.client("nobody"), hub.operator
    answers = {
        "no token": stranger.get(TASKS),
        "no token to change": stranger.post(TASKS, json={"agent_name": "idle", "description": "x"}),
        "no right": viewer.post(TASKS, json={"agent_name": "idle", "description": "x"}),
        "policy": operator.post(MESSAGES, json={"recipient": "idle", "type": ""}),
        "unknown recipient": operator.post(MESSAGES, json={"recipient": "nobody", "type": "x"}),
        "unknown agent": operator.post(TASKS, json={"agent_name": "nobody", "description": "x"}),
        "nothing there": operator.get(f"{AGENTS}/nobody"),
        "no route": operator.get("/api/hub/nothing"),
        "no method": operator.delete(TASKS),
        "malformed": operator.post(TASKS, content=b"{", headers={"Content-Type": "application/json"}),
        "unknown field": operator.post(TASKS, json={"agent_name": "idle", "description": "x", "more": 1}),
        "too large": operator.post(TASKS, content=b" " * (hub.settings.limits.payload_bytes + 1)),
    }
    assert all(set(answer.json()) == {"reason", "message"} for answer in answers.values())
    return {name: (answer.status_code, answer.json()["reason"]) for name, answer in answers.items()}


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A Kafka that nobody else needs."""
    broker = make_kafka(tmp_path_factory.mktemp("own-kafka"))
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture(scope="module")
def hub(own_kafka: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStack]:
    """One gateway that waits SETTLE_S for Kafka."""
    folder = tmp_path_factory.mktemp("hub-down")
    settings = hub_settings(own_kafka, folder)
    gateway = settings.gateway.model_copy(update={"settle_timeout_s": SETTLE_S})
    stack = HubStack(settings.model_copy(update={"gateway": gateway}), folder)
    try:
        stack.start(1)
        yield stack
    finally:
        stack.close()


def is_ready(hub: HubStack) -> bool:
    """True if the gateway says that it can work."""
    return hub.operator.get("/readyz").status_code == 200


@pytest.fixture(scope="module", params=[HANGS, GONE])
def outage(request: pytest.FixtureRequest, hub: HubStack, own_kafka: BrokerProcess) -> Outage:
    """All questions: as soon as Kafka is away, when that is known, when it is back, and once more."""
    client = hub.operator
    viewer = hub.client(hub.principal("viewer")[1])
    worker = hub.client(hub.principal("worker")[1])
    to_drain = f"to be drained {next(_numbers)}"
    asked = questions(hub, to_drain)
    before = {n: told.answer.json() for n, told in ask_each(client, asked, lambda one: not one.changes).items()}
    had = accepted_of_operator(hub.settings)
    with own_kafka.standing_still() if request.param == HANGS else own_kafka.away():
        at_first = ask_all_at_once(client, asked)
        wait_until(lambda: not is_ready(hub), what="not ready")
        later = ask_each(client, asked, lambda one: True)
        streams = {one.route: first_of(client, one) for one in asked if one.is_endless}
        refused = refusals(hub, viewer)
        begun = time.monotonic()
        empty_drain = Told(worker.get(MESSAGES), time.monotonic() - begun)
        open_routes = {one.route: client.get(one.url).status_code for one in asked if not one.action}
    wait_until(lambda: is_ready(hub), READY_S, "ready again")
    after = ask_each(client, asked, lambda one: True, ask_until_done)
    again = ask_each(client, asked, lambda one: one.changes, ask_until_done)
    told = (at_first, later, streams, refused, empty_drain, open_routes, after, again)
    return Outage(asked, to_drain, before, *told, accepted_of_operator(hub.settings) - had)


def check_unreachable(told: Told, limit_s: float) -> None:
    """That an answer is the 503 of HH-12, came in time, and says of nothing that it is done."""
    answer, seconds = told
    assert answer.status_code == 503, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"reason", "message"}
    assert answer.json()["reason"] == "unreachable" and answer.json()["message"]
    assert re.fullmatch(r"[1-9]\d*", answer.headers["Retry-After"])
    assert "Trunkline-Verdict" not in answer.headers
    assert seconds < limit_s


def test_the_questions_are_all_operations_of_the_page_and_some_of_each_kind(outage, hub):
    page = hub.operator.get("/openapi.json").json()
    assert [(one.route, one.method.lower()) for one in outage.asked] == [
        (route, method)
        for route, methods in page["paths"].items()
        for method in methods
        if is_asked(route, method)
    ]
    posts = {one.route for one in outage.asked if one.method == "POST"}
    deletes = {one.route for one in outage.asked if one.method == "DELETE"}
    assert {one.route for one in outage.asked if one.changes} == posts | deletes | {MESSAGES}
    assert len(posts) >= 15 and len(outage.before) >= 12
    assert len(outage.streams) == 5 and len(outage.open_routes) == 3


def test_what_changes_something_is_answered_503_in_time_and_at_once_when_kafka_is_known_to_be_away(outage):
    changes = {n: one for n, one in enumerate(outage.asked) if one.changes}
    for number in changes:
        check_unreachable(outage.at_first[number], IN_TIME_S)
        check_unreachable(outage.later[number], AT_ONCE_S)


def test_a_drain_of_an_empty_mailbox_does_not_say_that_it_is_empty_while_nobody_can_know(outage):
    check_unreachable(outage.empty_drain, AT_ONCE_S)


def test_what_only_reads_is_answered_from_the_live_view_as_before_and_at_once(outage):
    for number, shown in outage.before.items():
        for answer, seconds in (outage.at_first[number], outage.later[number]):
            route = outage.asked[number].route
            assert (answer.status_code, answer.json()) == (200, shown), route
            assert seconds < AT_ONCE_S, route


def test_whoever_follows_along_gets_the_snapshot_and_health_and_metrics_go_on(outage):
    for route, (answer, seconds) in outage.streams.items():
        assert (answer.status_code, bool(answer.text)) == (200, True), route
        assert seconds < AT_ONCE_S, route
    assert outage.open_routes == {"/healthz": 200, "/metrics": 200, "/readyz": 503}


def test_a_refusal_is_the_same_refusal_as_when_kafka_is_there(outage, hub):
    viewer = hub.client(hub.principal("viewer")[1])
    assert outage.refused == refusals(hub, viewer)
    assert {status for status, _ in outage.refused.values()} == {400, 401, 403, 404, 405, 413}


def test_when_kafka_is_back_each_request_under_its_key_is_done_and_has_had_its_effect_once(outage):
    changes = {n: one for n, one in enumerate(outage.asked) if one.changes and one.route != BROADCAST}
    for number, question in changes.items():
        first, second = outage.after[number].answer, outage.again[number].answer
        assert first.status_code in (200, 201), (question.route, first.text)
        assert second.status_code == first.status_code, (question.route, second.text)
        told = [{k: v for k, v in a.json().items() if k not in OF_THE_ANSWER} for a in (first, second)]
        assert told[0] == told[1], question.route
        if question.method != "GET":
            assert second.headers["Trunkline-Verdict"] == DUPLICATE, question.route
        else:
            one_of([one for one in second.json()["messages"] if one["payload"] == outage.to_drain])
    # The limits of a principal are two records: those of its mailbox are in the mailbox's stream.
    limits = sum(one.route.startswith("/api/hub/limits") for one in changes.values())
    assert outage.accepted == len(changes) + limits


def test_when_kafka_is_back_all_that_reads_is_answered_and_shows_what_was_done(outage):
    reads = {n: told for n, told in outage.after.items() if n in outage.before}
    assert {told.answer.status_code for told in reads.values()} == {200}
    totals = {
        outage.asked[n].route: told.answer.json()["total"] - outage.before[n]["total"]
        for n, told in reads.items()
        if outage.asked[n].route in (JOBS, TASKS)
    }
    # One task was submitted, and one comes with an agent that is spawned at the same moment.
    assert totals[JOBS] == 1
    assert totals[TASKS] in (1, 2)
