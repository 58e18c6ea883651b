"""The OpenAPI document of the hub (DL-13): it describes all that it names, and its examples are true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from connectors.hub.live.live_view import LiveView
from connectors.hub.services.hub import Hub
from connectors.programs.gateway_program.application import build_application
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    settings, keyring = Settings(), Keyring({"test": bytes(32)}, "test")
    return build_application(Hub(settings, keyring, "test", LiveView(settings, keyring))).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each operation, by method and path."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def fields(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field in a schema, at any depth."""
    if isinstance(schema, list):
        for one in schema:
            yield from fields(one, where)
    elif isinstance(schema, dict):
        for name, one in schema.get("properties", {}).items():
            yield f"{where}.{name}", one
        for name, one in schema.items():
            if name not in ("example", "examples", "default"):
                yield from fields(one, f"{where}.{name}")


def contents(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The body of each request and answer."""
    for name, operation in operations(document):
        bodies = {"request": operation.get("requestBody", {}), **operation["responses"]}
        for status, body in bodies.items():
            for media_type, content in body.get("content", {}).items():
                yield f"{name} {status} {media_type}", content


@pytest.mark.long
@pytest.mark.requirement("DL-13")
def test_every_operation_has_a_summary_a_description_a_group_its_roles_and_its_errors(document):
    bare = [
        name
        for name, operation in operations(document)
        if not (operation["summary"] and operation["tags"])
        or not re.search(r"\w.*\n\nRoles: \w.*\.$", operation["description"], re.DOTALL)
        or not {"4XX", "5XX"} <= set(operation["responses"])
        or not all(answer["description"] for answer in operation["responses"].values())
    ]
    assert bare == []
    assert len(list(operations(document))) > 60


@pytest.mark.requirement("DL-13")
def test_the_roles_in_a_description_are_those_that_the_gateway_admits(document):
    operation = document["paths"]["/api/hub/jobs/pick"]["post"]
    assert operation["x-trunkline-roles"] == {"operator": "all", "worker": "own"}
    assert operation["description"].endswith("\n\nRoles: operator, worker (own).")
    assert document["paths"]["/healthz"]["get"]["description"].endswith("\n\nRoles: all, without a token.")


@pytest.mark.requirement("DL-13")
def test_every_parameter_has_a_description(document):
    parameters = [
        (f"{name} {one['name']}", one)
        for name, operation in operations(document)
        for one in operation.get("parameters", ())
    ]
    assert [where for where, one in parameters if not one.get("description")] == []
    assert {one["in"] for _, one in parameters} == {"path", "query", "header"}


@pytest.mark.requirement("DL-13")
def test_every_field_of_every_request_and_answer_has_a_description(document):
    found = [
        *fields(document["components"]["schemas"], "schemas"),
        *(field for name, content in contents(document) for field in fields(content["schema"], name)),
    ]
    assert [where for where, one in found if not one.get("description")] == []
    assert len(found) > 350
    assert [name for name, one in document["components"]["schemas"].items() if not one.get("description")] == []


@pytest.mark.requirement("DL-13")
def test_every_request_and_answer_has_an_example_that_its_schema_allows(document):
    wrong = {}
    for where, content in contents(document):
        schema = {**content["schema"], "components": document["components"]}
        try:
            jsonschema.validate(content["example"], schema, format_checker=jsonschema.FormatChecker())
        except (KeyError, jsonschema.ValidationError) as error:
            wrong[where] = str(error)[:300]
    assert wrong == {}


@pytest.mark.requirement("DL-13")
def test_every_path_parameter_has_an_example_that_its_schema_allows(document):
    for _, operation in operations(document):
        for one in operation.get("parameters", ()):
            if one["in"] == "path":
                jsonschema.validate(one["example"], one["schema"])
