"""Actions that follow from declared operations, without a gateway: their requests and output (CM-06)."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any, Self

import pytest

from connectors.cli.main import main
from connectors.cli.shared.actions import Actions, Declared, Given, add_actions
from connectors.cli.shared.call import Call
from connectors.cli.shared.declared import add_declared
from connectors.cli.shared.declared_requests import REQUESTS
from connectors.hub.engine.operation import Operation
from connectors.hub.serving.api_document import _example
from connectors.operations.every_operation import OPERATIONS
from connectors.plumbing.gateway_client import gateway_client

pytestmark = pytest.mark.requirement("CM-06")
COMMANDS = {one.COMMAND: one for one in OPERATIONS if one.COMMAND is not None}


class Gateway:
    """As the client of a gateway, which keeps the request and gives one answer."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.sent = answer, list[tuple[str, str, Any]]()

    def __call__(self, settings: Any) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def get(self, path: str, parameters: Any) -> Any:
        self.sent.append(("GET", path, {name: one for name, one in parameters.items() if one is not None}))
        return self.answer

    def get_all(self, path: str, key: str, name_of: Any, parameters: Any) -> Any:
        assert all(name_of(row) for row in self.answer[key])
        return self.get(path, parameters)

    def post(self, path: str, body: Any, *, request_id: str | None = None) -> Any:
        self.sent.append(("POST", path, {name: one for name, one in body.items() if one is not None}))
        return {**self.answer, "request_id": request_id}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the gateway give an answer to an operation, and return it."""

    def answer(kind: type[Operation]) -> Gateway:
        schema = kind.ANSWER.model_json_schema(ref_template="#/components/schemas/{model}")
        models = {**schema.get("$defs", {}), "Answer": schema}
        found = Gateway(_example({"$ref": "#/components/schemas/Answer"}, models))
        monkeypatch.setattr(gateway_client, "GatewayClient", found)
        return found

    return answer


@pytest.mark.parametrize("command", COMMANDS)
def test_each_declared_action_sends_its_request_and_shows_the_answer(
    command: str, answered: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, given = COMMANDS[command], shlex.split(REQUESTS[command].example)
    gateway = answered(kind)
    assert main([*command.split(), *given]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() and f"trunkline {command.split()[0]}:" not in shown.err
    assert main([*command.split(), *given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = REQUESTS[command].rows
    if rows is None:
        assert {name: told[name] for name in gateway.answer} == gateway.answer
    else:
        assert gateway.answer[rows] in told.values()
    path = kind.PATH
    for name, value in zip(kind.PARAMETERS, given, strict=False):
        path = path.replace(f"{{{name}}}", value)
    assert [one[:2] for one in gateway.sent] == [(kind.METHOD, path)] * 2
    model = kind.BODY if kind.METHOD == "POST" else kind.QUERY
    assert model is None or gateway.sent[0][2].keys() <= model.model_fields.keys()


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        (("topics", "list", "--limit", "3", "--after", "news"), {"limit": 3, "after": "news"}),
        (("topics", "subscribe", "news", "--as", "bo"), {"subscriber": "bo"}),
        (("tasks", "list", "--agent", "echo", "--status", "failed"), {"agent_name": "echo", "limit": 50}),
        (("tasks", "fail", "t1", "it rains"), {"error": "it rains"}),
        (("jobs", "list", "--older-than", "2h", "--state", "running"), {"older_than_s": 7200.0}),
        (("agents", "active", "--capability", "count"), {"capability": "count"}),
        (("webhooks", "pause", "ann", "--reason", "moving"), {"reason": "moving"}),
    ],
)
def test_options_of_declared_actions_are_fields_of_the_request(
    arguments: tuple[str, ...], sent: dict[str, Any], answered: Any
) -> None:
    gateway = answered(COMMANDS[" ".join(arguments[:2])])
    assert main(arguments) == 0
    assert sent.items() <= gateway.sent[0][2].items()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("topics", "subscribe", "a b"), "not the name of a topic"),
        (("agents", "show", ".."), "not the name of an agent"),
        (("schedules", "show", "a/b"), "not the name of a schedule"),
        (("tokens", "revoke", "secret-token"), "expected the 12 lower-case hex digits"),
        (("jobs", "show", "x"), "not a job id"),
    ],
)
def test_an_argument_that_is_not_valid_is_refused_without_a_request(
    arguments: tuple[str, ...], text: str, answered: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = answered(COMMANDS[" ".join(arguments[:2])])
    assert main(arguments) == 2
    assert text in capsys.readouterr().err and gateway.sent == []


def test_an_action_that_its_command_does_not_describe_has_all_fields_of_a_row_as_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (Given("older_s", "least age", "seconds"), Given("limit", "", "limit"))
    monkeypatch.setitem(REQUESTS, "places list", Declared("GET", ("places",), "List places", given, "places"))
    gateway = Gateway({"places": [{"name": "here", "seen_by": None}], "total": 2})
    monkeypatch.setattr(gateway_client, "GatewayClient", gateway)
    actions, parser = Actions(), argparse.ArgumentParser()
    add_declared(actions, "places")
    add_actions(parser, actions)
    call = parser.parse_args(["list", "--older", "5m", "--limit", "1"], Call())
    call.settings = None
    assert call.run(call) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["NAME  SEEN BY", "here  -"]
    assert shown.err == "1 of 2; --limit shows more\n"
    assert gateway.sent == [("GET", "/api/hub/places", {"older_s": 300.0, "limit": 1})]
