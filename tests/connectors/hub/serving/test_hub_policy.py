"""The policy of the hub: each question by itself, and that no route comes to its handler without a decision."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import settings as checks
from hypothesis import strategies as st
from pydantic import BaseModel

from connectors.hub.live.live_view import LiveView
from connectors.hub.services.hub import Hub
from connectors.hub.serving import admission
from connectors.hub.serving.admission import AdmittedRoute
from connectors.hub.serving.policy import Action, Caller, Decision, decide, has_capability, owner_of_task
from connectors.operations.rules.hub_policy import PolicyResult, evaluate_message, evaluate_task_assignment
from connectors.programs.gateway_program.application import build_application
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import Settings
from schemas.streams.agents.agent_registry import REGISTRY_AGENTS, AgentRow
from schemas.streams.principal.principals import AGENT, REGISTRY_PRINCIPALS, PrincipalRow, token_hash
from schemas.streams.task.task_registry import TokenRow

pytestmark = pytest.mark.requirement("HH-09")

CONTRACTS = {"/contracts", "/contracts/asyncapi.json", "/contracts/schemas/{name}"}
OPEN = {"/healthz", "/readyz", "/metrics", "/docs", "/docs/{name}", *CONTRACTS}
TOKEN = "the-operators-token-of-these-tests"
AGENT_CALLER = Caller("echo", AGENT, "t1", "0" * 12, ("answer",))


class Rows:
    """A live view of two registries: agents and principals by name, and their status."""

    def __init__(self, agents: dict[str, str], principals: dict[str, str]) -> None:
        self._rows: dict[tuple[str, str], Any] = {}
        for name, status in agents.items():
            row = AgentRow(name, status, "i", "d", ["answer"], False, 1, None if status == "defined" else 2)
            self._rows[REGISTRY_AGENTS, name] = row
        for name, status in principals.items():
            self._rows[REGISTRY_PRINCIPALS, name] = PrincipalRow(name, "worker", status, "0" * 64, "o", 1, None)

    def row(self, view: str, key: str) -> Any:
        """The row under this key."""
        return self._rows.get((view, key))

    def get(self, row_type: Any, key: str) -> Any:
        """The row of this type under this key."""
        return self.row(row_type.VIEW, key)


ROWS: Any = Rows({"echo": "defined", "gone": "removed"}, {"ann": "active", "old": "revoked"})


@pytest.mark.parametrize(
    ("agent", "description", "allowed"),
    [
        ("echo", "some work", True),
        ("echo", "", False),
        ("echo", " \n\t", False),
        ("gone", "some work", False),
        ("nobody", "some work", False),
        ("ann", "some work", False),
        ("", "some work", False),
    ],
)
def test_a_task_goes_to_an_agent_that_is_registered_and_has_a_description(agent, description, allowed):
    found = evaluate_task_assignment(ROWS, agent, description)
    assert found.allowed is allowed
    assert bool(found.reason) is not allowed


@pytest.mark.parametrize(
    ("recipient", "kind", "allowed"),
    [
        ("echo", "ask", True),
        ("hub", "ask", True),
        ("operator", "ask", True),
        ("ann", "ask", True),
        ("echo", "", False),
        ("echo", "  ", False),
        ("gone", "ask", False),
        ("old", "ask", False),
        ("nobody", "ask", False),
        ("reactor", "ask", False),
    ],
)
def test_a_message_goes_to_somebody_known_and_has_a_type(recipient, kind, allowed):
    found = evaluate_message(ROWS, AGENT_CALLER, recipient, kind)
    assert found.allowed is allowed
    assert bool(found.reason) is not allowed


SEND, PUBLISH, BROADCAST = Action.MESSAGE_SEND, Action.TOPIC_PUBLISH, Action.MESSAGE_BROADCAST
SUBMIT, SCHEDULE = Action.TASK_SUBMIT, Action.SCHEDULE_SET
RESTRICTED = {SEND, PUBLISH, BROADCAST, SUBMIT, SCHEDULE}


@pytest.mark.requirement("HO-20")
@pytest.mark.parametrize(
    ("capabilities", "permitted"),
    [
        ((), RESTRICTED),
        (("answer",), RESTRICTED),
        (("messages", "task", "audit.read"), RESTRICTED),
        (("answer", "message.send"), {SEND, PUBLISH}),
        (("message.broadcast",), {BROADCAST}),
        (("message.send", "message.broadcast"), {SEND, PUBLISH, BROADCAST}),
        (("message.none", "topic.publish"), {PUBLISH}),
        (("task.submit",), {SUBMIT}),
        (("message.send", "schedule.set"), {SEND, PUBLISH, SCHEDULE}),
        (("schedule.set",), RESTRICTED),
        # An unknown name of the two families grants nothing and still restricts.
        (("message.sned",), set()),
        (("task.end", "Message.send"), set()),
    ],
)
def test_action_capabilities_of_a_token_permit_the_restricted_actions_that_they_name(capabilities, permitted):
    caller = Caller("echo", AGENT, "t1", "0" * 12, capabilities)
    assert {action for action in Action if not has_capability(caller, action)} == RESTRICTED - permitted
    for action in Action:
        owner = owner_of_task("t1")
        by_role = decide(AGENT_CALLER, action, owner).allowed
        assert decide(caller, action, owner).allowed is (
            by_role and (action in permitted | set(Action) - RESTRICTED)
        )


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_reason_quotes_what_was_sent(name, text):
    said = f"canary{name}", f"canary{text}"
    for found in (
        evaluate_task_assignment(ROWS, *said),
        evaluate_task_assignment(ROWS, "echo", ""),
        evaluate_message(ROWS, AGENT_CALLER, *said),
    ):
        assert not found.allowed and found.reason and "canary" not in found.reason


ANY, ITS_TASK, ITS_MAILBOX = "any", owner_of_task("t1"), "echo"
RIGHTS_OF_AN_AGENT = {
    Action.MESSAGE_SEND: ANY,
    Action.MESSAGE_BROADCAST: ANY,
    Action.MESSAGE_DRAIN: ANY,
    Action.MESSAGE_MARK: ANY,
    Action.TOPIC_PUBLISH: ANY,
    Action.TOPIC_SUBSCRIBE: ITS_MAILBOX,
    Action.TOPIC_READ: ANY,
    Action.AGENT_READ: ANY,
    Action.TASK_READ: ITS_TASK,
    Action.TASK_END: ITS_TASK,
    Action.MAILBOX_READ: ITS_MAILBOX,
    Action.SCHEDULE_LIST: ANY,
    Action.WEBHOOK_LIST: ANY,
    Action.WEBHOOK_READ: ITS_MAILBOX,
    **dict.fromkeys((Action.SCHEDULE_SET, Action.SCHEDULE_REMOVE, Action.SCHEDULE_READ), ITS_TASK),
}


@pytest.mark.parametrize("action", Action)
def test_an_agent_has_exactly_these_rights_and_those_over_a_task_by_its_token_alone(action):
    own = RIGHTS_OF_AN_AGENT.get(action)
    for owner in (None, "ann", "t1", owner_of_task("t2"), owner_of_task("")):
        assert decide(AGENT_CALLER, action, owner).allowed is (own == ANY)
    assert own in (None, ANY) or decide(AGENT_CALLER, action, own).allowed
    # Another task of the same agent, and a principal of its name, have no part in the task.
    if own == ITS_TASK:
        for namesake in (Caller("echo", AGENT, "t2"), Caller("echo", AGENT), Caller("echo", "worker")):
            assert not decide(namesake, action, ITS_TASK).allowed


class Doorway:
    """The whole application over a hub that was never opened, each handler replaced by a note."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(data_dir=folder)
        keyring = ensure_keyring(settings)
        self.hub = Hub(settings, keyring, TOKEN, LiveView(settings, keyring))
        self.app: FastAPI = build_application(self.hub)
        self.reached: list[str] = []
        self.refused: list[tuple[Any, ...]] = []
        self.hub.refusals.record = lambda *said: self.refused.append(said)  # type: ignore[method-assign]
        for route in self.routes:
            self._watch(route)

    @property
    def routes(self) -> list[APIRoute]:
        """The routes that have a handler of ours."""
        return [route for route in self.app.routes if isinstance(route, APIRoute)]

    def _watch(self, route: APIRoute) -> None:
        """Let a route note that its handler is reached, and do nothing else."""

        async def noted(**_: Any) -> Response:
            self.reached.append(route.path)
            return Response(status_code=204)

        noted.__signature__ = inspect.signature(route.endpoint, eval_str=True)  # type: ignore[attr-defined]
        route.endpoint = route.dependant.call = noted

    def ask(self, method: str, path: str, token: str | None, body: bytes = b"") -> httpx.Response:
        """One request to the application."""
        headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": token})

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://hub") as client:
                return await client.request(method, path, headers=headers, content=body)

        return asyncio.run(send())


@pytest.fixture(scope="module")
def doorway(tmp_path_factory: pytest.TempPathFactory) -> Doorway:
    """The application, not opened: whatever comes past the gate is seen and does nothing."""
    return Doorway(tmp_path_factory.mktemp("doorway"))


def filled(path: str) -> str:
    """A route's address, with something that may stand in each place."""
    return re.sub(r"\{(\w+)\}", lambda found: "0" * {"job_id": 8, "token_id": 12}.get(found[1], 1), path)


def test_each_route_names_its_action_and_only_health_and_metrics_are_open(doorway):
    others = {getattr(route, "path", "?") for route in doorway.app.routes if not isinstance(route, APIRoute)}
    assert others == {"/openapi.json"}
    assert all(isinstance(route, AdmittedRoute) for route in doorway.routes)
    asking = {route.path: route.admission for route in doorway.routes if isinstance(route.admission, tuple)}
    assert {route.path for route in doorway.routes} - set(asking) <= OPEN
    assert {"/healthz", "/readyz"} <= {route.path for route in doorway.routes} - set(asking)
    assert all(isinstance(action, Action) and callable(owner) for action, owner, _ in asking.values())
    named = {action for action, *_ in (r.admission for r in doorway.routes if isinstance(r.admission, tuple))}
    assert named == set(Action)


@checks(max_examples=80, deadline=None)
@given(
    number=st.integers(0, 1000),
    token=st.none()
    | st.sampled_from(["", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer{TOKEN}"])
    | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30).map(
        lambda text: f"Bearer {text}"
    ),
    body=st.sampled_from([b"", b"{}", b"[", b"null", b'{"session": "x"}', b"\xff"]),
)
def test_no_request_without_a_good_token_comes_to_a_handler_or_to_its_body(doorway, number, token, body):
    guarded = [route for route in doorway.routes if route.path not in OPEN]
    route = guarded[number % len(guarded)]
    (method,) = route.methods
    doorway.reached.clear()
    answer = doorway.ask(method, filled(route.path), token, body)
    assert answer.status_code == 401
    assert method == "HEAD" or answer.json()["reason"] == "unauthorized"
    assert doorway.reached == []


def test_every_route_is_decided_once_and_a_no_ends_it_before_the_handler_with_a_row(doorway, monkeypatch):
    decided: list[tuple[str, Action]] = []

    def refuse(caller: Caller, action: Action, owner: str | None = None) -> Decision:
        decided.append((caller.principal, action))
        return Decision(False, "not in this test")

    for route in doorway.routes:
        if route.path in OPEN:
            continue
        (method,) = route.methods
        for is_allowed in (False, True):
            monkeypatch.setattr(admission, "decide", refuse)
            if is_allowed:
                monkeypatch.setattr(admission, "decide", lambda *_: decided.append(_[:2]) or Decision(True))
            decided.clear()
            doorway.reached.clear()
            doorway.refused.clear()
            answer = doorway.ask(method, filled(route.path), f"Bearer {TOKEN}", b"[")
            assert len(decided) == 1 and decided[0][1] == route.admission[0], route.path
            if not is_allowed:
                assert answer.status_code == 403
                assert method == "HEAD" or answer.json()["message"] == "not in this test"
                assert doorway.reached == []
                assert doorway.refused == [("policy", "not in this test", "operator", f"{method} {route.path}")]
            else:
                # Now the handler is reached, or its body is refused, which comes after.
                assert doorway.reached == [route.path] or answer.status_code == 400, route.path


def test_handlers_that_are_reached_are_seen_so_that_the_tests_above_prove_something(doorway):
    doorway.reached.clear()
    assert doorway.ask("GET", "/api/hub/tasks", f"Bearer {TOKEN}").status_code == 204
    assert doorway.ask("GET", "/healthz", None).status_code == 204
    assert doorway.reached == ["/api/hub/tasks", "/healthz"]


@pytest.mark.requirement("HO-20")
def test_a_token_limited_to_broadcasts_is_refused_at_other_routes_that_send_and_recorded(doorway):
    limited = TokenRow(
        "1" * 12, token_hash("limited"), "echo", "t1", ["message.broadcast"], "active", 1, 10**15, None, None
    )
    doorway.hub.identities.changed(AppliedChange(TokenRow.VIEW, limited.token_id, 1, limited))
    doorway.refused.clear()
    for path in ("/api/hub/messages", "/messages"):
        answer = doorway.ask("POST", path, "Bearer limited", b"[")
        assert (answer.status_code, answer.json()["reason"]) == (403, "policy")
    assert doorway.ask("GET", "/api/hub/messages", "Bearer limited").status_code == 204
    doorway.reached.clear()
    doorway.ask("POST", "/api/hub/messages/broadcast", "Bearer limited", b'{"type": "note"}')
    assert doorway.reached == ["/api/hub/messages/broadcast"]
    why = "the capabilities of the task's token do not include message.send"
    assert doorway.refused == [
        ("policy", why, "echo", f"POST {path}") for path in ("/api/hub/messages", "/messages")
    ]


MODELS = {
    "AgentDefinition": ("/agents/{name}", "get", "name image description capabilities hardened"),
    "Token": ("/tokens/{token_id}/revoke", "post", "token_id agent_name task_id capabilities issued expiry"),
    "Task": ("/tasks/{task_id}", "get", "id description agent_name status token_id session_name result error"),
    "SessionContext": ("/containers", "get", "session_name container_name port role state secrets backend"),
    "MessageEnvelope": ("/messages", "post", "recipient type payload"),
    "Message": ("/messages", "get", "id timestamp sender recipient type payload"),
}


@pytest.mark.long
@pytest.mark.requirement("HH-11")
@pytest.mark.parametrize("model", MODELS)
def test_each_model_of_the_hub_has_the_fields_of_the_specification_on_the_openapi_page(doorway, model):
    path, method, fields = MODELS[model]
    page = doorway.app.openapi()
    operation = page["paths"][f"/api/hub{path}"][method]
    part = operation["requestBody"] if model == "MessageEnvelope" else operation["responses"]["200"]

    def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
        return dict(page["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"])

    found = properties_of(part["content"]["application/json"]["schema"])
    lists = [one["items"] for one in found.values() if "$ref" in one.get("items", {})]
    shown = properties_of(lists[0]) if lists else found
    assert set(fields.split()) <= set(shown)


@pytest.mark.requirement("HH-11")
def test_the_answer_of_the_policy_is_a_pydantic_model():
    assert issubclass(PolicyResult, BaseModel)
    assert set(PolicyResult.model_fields) == {"allowed", "reason"}


@pytest.mark.requirement("XP-15")
def test_the_openapi_page_documents_the_body_and_the_rights_of_an_xml_message(doorway):
    operation = doorway.app.openapi()["paths"]["/messages"]["post"]
    content = operation["requestBody"]["content"]
    assert operation["requestBody"]["required"]
    assert {media_type: one["schema"] for media_type, one in content.items()} == {
        "application/xml": {"type": "string"}
    }
    assert operation["x-trunkline-action"] == "message.send"
