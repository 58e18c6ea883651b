"""The JSON Schemas of the record types (CT-02): they decide as the fold's check of the form does."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from connectors.doors.http_api.contracts.json_schemas import (
    MQTT_PAYLOADS,
    kind_of,
    payload_schema,
    record_schema,
)
from schemas.streams.fold import RECORD_TYPES
from tests.random_log import RandomLog
from tests.schemas.job_records import KEYRING
from tests.schemas.stream_records import GOOD

pytestmark = pytest.mark.requirement("CT-02")


DRAFTS = (jsonschema.Draft202012Validator, jsonschema.Draft7Validator)
# The same drafts by a library that reads patterns as ECMA 262 does, which JSON Schema prescribes. In Python `$`
# allows a newline, and `\w` is any letter.
ECMA_DRAFTS = (jsonschema_rs.Draft202012Validator, jsonschema_rs.Draft7Validator)
SCHEMAS = {name: record_schema(name) for name in RECORD_TYPES}
ODD = (
    *(None, True, False, 0, 1, -1, 2, 1.5, 2**63, "", "x", [], {}, ["x"], ["x", "x"], {"x": 1}),
    *("0a1b2c3d", "0A1B2C3D", "0a1b2c3d\n", "a/b", "-", "x" * 128, "x" * 129, "x" * 501, "\U0001f600" * 500),
    *("2026-11-21T10:00:00Z", "2026-11-21T10:00:00.123456789Z", "2026-11-21 10:00:00Z", "\x7f", "a\tb", "a\nb"),
    *("m:f", "m.\u00e9:f", "0" * 64, "f" * 16, "high", "http://a.test/", "tmux/a/1", "* * * * *"),
)
# Rules that JSON Schema cannot express: between fields, or decided by code.
OF_CODE = {"value_error"}
# The fold also reads 1 as `true` in these fields. No door writes that.
ONLY_TRUE = ("takes_over", "opens_thread", "unlimited")


def fold_accepts(record_type: str, body: dict[str, Any]) -> bool:
    """True if the fold finds no fault in the form of a body."""
    return not faults(record_type, body)


def faults(record_type: str, body: dict[str, Any]) -> set[str]:
    """The kinds of faults that the fold finds in the form of a body."""
    kind = kind_of(record_type)
    version = body.get("schema_version", 1 if record_type in kind.foreign_types else None)
    if type(version) is not int or version != 1:
        return {"schema_version"}
    try:
        kind.models[record_type].model_validate(body)
    except ValidationError as error:
        return {one["type"] for one in error.errors()}
    return OF_CODE if any(type(body.get(name)) is int for name in ONLY_TRUE) else set()


def verdicts(record_type: str, body: dict[str, Any]) -> set[bool]:
    """The answers of both drafts about a body. AsyncAPI documents contain draft 7, so both must be the same."""
    return {validator.is_valid(body) for validator in validators(record_type)}


@cache
def validators(record_type: str) -> list[Any]:
    """The validators of a record type's schema, one of each draft."""
    return [draft(SCHEMAS[record_type]) for draft in ECMA_DRAFTS]


def changed_bodies(record_type: str) -> Iterator[dict[str, Any]]:
    """A good body, without each of its fields, and with odd values in each field, also of objects in it."""
    body = GOOD[record_type][1]
    yield body
    for name in (*body, "more"):
        yield {key: value for key, value in body.items() if key != name}
    for name in (*SCHEMAS[record_type]["properties"], "more"):
        yield from ({**body, name: value} for value in ODD)
    for name, inner in body.items():
        for part in fields_within(record_type, name):
            yield from ({**body, name: {**inner, part: value}} for value in ODD)


def fields_within(record_type: str, name: str) -> Iterator[str]:
    """The fields of the object that a field of a body is, if it is one."""
    schema = SCHEMAS[record_type]
    definition = schema["properties"].get(name, {}).get("$ref", "").rpartition("/")[2]
    yield from schema.get("$defs", {}).get(definition, {}).get("properties", ())


def body_of(value: bytes | None) -> dict[str, Any] | None:
    """The body of a record, or None if it is no object."""
    try:
        body = json.loads(value or b"")
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


@pytest.mark.parametrize("name", [*RECORD_TYPES, *MQTT_PAYLOADS])
def test_a_schema_is_valid_in_both_drafts_and_names_itself(name: str) -> None:
    schema = record_schema(name) if name in RECORD_TYPES else payload_schema(name)
    for draft in DRAFTS:
        draft.check_schema(schema)
    assert schema["$id"] == f"urn:trunkline:schema:{name}"
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    assert schema["description"]
    assert schema["title"]


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_a_schema_accepts_and_rejects_nearly_right_bodies_as_the_fold_does(record_type: str) -> None:
    decided = set()
    for body in changed_bodies(record_type):
        found = faults(record_type, body)
        if not found:
            assert verdicts(record_type, body) == {True}, body
        elif not found & OF_CODE:
            assert verdicts(record_type, body) == {False}, (found, body)
        decided.add(not found)
    assert decided == {True, False}


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_schema_accepts_whatever_the_fold_accepts(data: st.DataObject) -> None:
    record_type = data.draw(st.sampled_from(RECORD_TYPES))
    body = copy.deepcopy(GOOD[record_type][1])
    names = (*SCHEMAS[record_type]["properties"], "more")
    values = st.sampled_from(ODD) | st.text(max_size=4) | st.integers() | st.floats(allow_nan=False)
    body |= data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    if fold_accepts(record_type, body):
        assert verdicts(record_type, body) == {True}


def test_the_schemas_accept_the_bodies_of_a_log_that_the_fold_accepts() -> None:
    seen = set()
    for record in RandomLog(7, KEYRING).records(3000):
        record_type, body = (dict(record.headers).get("ce_type") or b"").decode(), body_of(record.value)
        if record_type in SCHEMAS and body is not None and fold_accepts(record_type, body):
            assert verdicts(record_type, body) == {True}, (record_type, body)
            seen.add(record_type)
    assert len(seen) > 40


@pytest.mark.parametrize("field", ["message_id", "answers"])
def test_a_fault_in_a_message_within_an_ack_is_found(field: str) -> None:
    body = copy.deepcopy(GOOD["message.acked"][1])
    body["answers"] = [copy.deepcopy(GOOD["message.posted"][1])]
    assert verdicts("message.acked", body) == {True}
    body["answers"][0][field] = 5
    assert verdicts("message.acked", body) == {False}
