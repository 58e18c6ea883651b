"""The contracts as documents (CT-01, CT-03, CT-04): OpenAPI, AsyncAPI and the routes that serve them."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from connectors.doors.http_api.contracts.asyncapi import asyncapi_document, header_schema
from connectors.doors.http_api.contracts.document_routes import contract_files, file_of
from connectors.doors.http_api.contracts.json_schemas import (
    EXAMPLES,
    MQTT_INBOX_MESSAGE,
    MQTT_JOB_EVENT,
    MQTT_JOB_RECEIPT,
    MQTT_MESSAGE_RECEIPT,
    MQTT_OUTBOX_MESSAGE,
    MQTT_PAYLOADS,
    payload_schema,
)
from connectors.doors.mqtt_bridge.bridge_records import receipt_of
from connectors.hub.engine.family import add_operation
from connectors.hub.live.live_view import LiveView
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import AdmittedRoute
from connectors.programs.gateway_program.application import build_application
from schemas.keys.record_macs import GATEWAY
from schemas.keys.sealing import Keyring
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.agents.mqtt_agents import AGENT_SAID
from schemas.streams.fold import RECORD_TYPES
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.wire.record import OutgoingRecord, oversized
from tests.raw_records import raw, with_mac
from tests.schemas.job_records import JOB_ID, KEYRING, SECRET, signed
from tests.schemas.stream_records import GOOD
from trunkline_agent.wire.agent_message import sign_said
from trunkline_agent.wire.receipt import LogPosition
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import events_topic, inbox_topic, outbox_topic, receipts_topic
from trunkline_agent.wire.verdicts import REASONS

DIGESTS = PROJECT_ROOT / "docs" / "reference" / "contracts.sha256"
KEYS = Keyring({"test": bytes(32)}, "test")
DOCUMENT = asyncapi_document(Settings())
SAID = {"message_id": "m-1", "to": "planner", "kind": "ask", "body": [1.5, None], "seq": 3, "mood": "good"}

# The routes that are no declared operations, with the reason. The list may only get shorter.
BY_HAND = {
    "GET /healthz": "no token",
    "GET /readyz": "no token",
    "GET /metrics": "no token",
    "GET /docs": "a page",
    "GET /docs/{name}": "a file of the page",
    "GET /contracts": "a file",
    "GET /contracts/asyncapi.json": "a file",
    "GET /contracts/schemas/{name}": "a file",
    "GET /api/hub/messages/events": "a stream",
    "GET /api/hub/events": "a stream",
    "GET /api/hub/jobs/{job_id}/events": "a stream",
    "GET /api/hub/verdicts": "a stream",
    "PUT /api/hub/blobs": "an upload",
    "GET /api/hub/mailboxes/{realm}/{name}/messages/{message_id}/blob": "a download",
    "POST /api/hub/jobs/{job_id}/events": "the body is the signed bytes",
    "POST /messages": "the body is XML",
    "POST /api/hub/pump/lease": "the pump's own: it waits for messages while the pump is there",
    "POST /api/hub/pump/settle": "the pump's own: the handlers' answers in several steps",
    "POST /api/hub/pump/history": "the pump's own",
    "POST /api/hub/pump/started": "the pump's own",
}
BY_HAND_MOST = 20


@pytest.fixture(scope="module")
def app() -> Any:
    """The application with the default settings."""
    return application(Settings())


def application(settings: Settings) -> Any:
    """The hub's application, which needs no Kafka for the contracts."""
    return build_application(Hub(settings, KEYS, "test", LiveView(settings, KEYS)))


def got(app: Any, path: str, **headers: str) -> httpx.Response:
    """The answer to a request without a token."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://hub") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(send())


def committed_digests() -> dict[str, str]:
    """The SHA-256 of each contract, by its path."""
    lines = (line.split("  ") for line in DIGESTS.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in lines}


def openapi_faults(document: dict[str, Any]) -> list[str]:
    return [fault.message for fault in OpenAPIV31SpecValidator(document).iter_errors()]


def is_valid(name: str, payload: Any) -> bool:
    schema = payload_schema(name)
    return jsonschema.Draft202012Validator(schema).is_valid(payload)


@pytest.mark.long
@pytest.mark.requirement("CT-01")
def test_the_openapi_document_has_no_fault_and_a_broken_one_has(app: Any) -> None:
    document = got(app, "/openapi.json").json()
    assert openapi_faults(document) == []
    assert document["openapi"].startswith("3.1")
    jobs = copy.deepcopy(document["paths"]["/api/hub/jobs"])
    jobs["post"]["requestBody"]["content"] = {"application/json": {"schema": 5}}
    assert openapi_faults(document | {"paths": {"/api/hub/jobs": jobs}}) != []


@pytest.mark.requirement("CT-01")
def test_the_digests_are_those_of_the_files_that_the_code_makes_and_no_others() -> None:
    made = contract_files(Settings())
    found = committed_digests()
    assert found.pop("openapi.json")
    assert found == {name: hashlib.sha256(content).hexdigest() for name, content in made.items()}
    assert contract_files(Settings()) == made
    assert {Path(path).stem for path in made if path.startswith("schemas/")} == {*RECORD_TYPES, *MQTT_PAYLOADS}


@pytest.mark.requirement("CT-03")
@pytest.mark.parametrize(
    ("channel", "topic", "value"),
    [
        ("jobEvents", events_topic, JOB_ID),
        ("jobReceipts", receipts_topic, JOB_ID),
        ("inbox", inbox_topic, "planner"),
        ("outbox", outbox_topic, "planner"),
    ],
)
def test_a_channel_has_the_address_of_the_topic(
    channel: str, topic: Callable[[str, str], str], value: str
) -> None:
    settings = Settings.model_validate({"mqtt": {"topic_prefix": "p/jobs", "agents_prefix": "p/agents"}})
    found = asyncapi_document(settings)["channels"][channel]
    (parameter,) = found["parameters"]
    prefix = settings.mqtt.topic_prefix if value == JOB_ID else settings.mqtt.agents_prefix
    assert found["address"].replace(f"{{{parameter}}}", value) == topic(prefix, value)


@pytest.mark.requirement("CT-03")
def test_the_address_of_a_server_is_not_that_of_the_settings() -> None:
    hidden = {"mqtt": {"host": "inside.test"}, "kafka": {"bootstrap_servers": "inside.test:9"}}
    assert asyncapi_document(Settings.model_validate(hidden)) == DOCUMENT


@pytest.mark.requirement("CT-03")
@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_key_headers_and_body_of_a_record_are_as_its_message_says(record_type: str) -> None:
    key, body = GOOD[record_type]
    sender = {"door": "http", "principal": "ann"}
    record = OutgoingRecord(key.decode(), "r1", type=record_type, value=canonical(body), **sender)
    sent = with_mac(raw(record), KEYRING.mac_key(GATEWAY))
    message = DOCUMENT["components"]["messages"][record_type]
    parts = {"components": DOCUMENT["components"]}
    headers = {name: (value or b"").decode() for name, value in sent.headers}
    jsonschema.validate(headers, {**message["headers"], **parts}, jsonschema.Draft7Validator)
    jsonschema.validate(body, {**message["payload"], **parts}, jsonschema.Draft7Validator)
    jsonschema.validate((sent.key or b"").decode(), message["bindings"]["kafka"]["key"])
    check = jsonschema.Draft7Validator({**message["headers"], **parts})
    for name, wrong in {"ce_type": "job.painted", "ce_subject": "tea/1", "ce_source": "http"}.items():
        assert not check.is_valid({**headers, name: wrong}), name
        assert not check.is_valid({other: value for other, value in headers.items() if other != name}), name


@pytest.mark.requirement("CT-03")
def test_each_header_that_a_record_can_have_is_described() -> None:
    record = OutgoingRecord(
        f"job/{JOB_ID}", "r1", "mqtt", "unverified", JOB_EVENT, b"x" * 2000, traceparent="t"
    )
    names = {name for name, _ in oversized(record, 1000).headers(mac=("key", "mac"))}
    assert names == set(header_schema()["properties"])


@pytest.mark.requirement("CT-03")
@pytest.mark.parametrize("name", MQTT_PAYLOADS)
def test_the_example_of_a_payload_is_valid_and_without_a_field_it_is_not(name: str) -> None:
    example, schema = EXAMPLES[name], payload_schema(name)
    assert is_valid(name, example)
    for field in schema["required"]:
        assert not is_valid(name, {key: value for key, value in example.items() if key != field}), field


@pytest.mark.requirement("CT-03")
def test_a_signed_payload_is_valid_and_one_without_a_signature_is_not() -> None:
    event = signed(3, "progress", data={"step": 3}, mood="good")
    assert is_valid(MQTT_JOB_EVENT, event)
    assert not is_valid(MQTT_JOB_EVENT, {**event, "data": {"step": 3}})
    assert not is_valid(MQTT_JOB_EVENT, {**event, "data": {"hmac_sig": "A" * 64}})
    assert is_valid(MQTT_OUTBOX_MESSAGE, sign_said(SAID, SECRET))
    assert not is_valid(MQTT_OUTBOX_MESSAGE, SAID)


@pytest.mark.requirement("CT-03")
@pytest.mark.parametrize(
    "settled",
    [
        (LogPosition(2, 4711), "accepted"),
        (LogPosition(2, 4711),),
        *((LogPosition(0, 0), "rejected", reason) for reason in REASONS),
        (None, "rejected", "rate_limited", 12),
    ],
    ids=repr,
)
def test_every_receipt_of_the_bridge_is_valid(settled: tuple[Any, ...]) -> None:
    for payload in (canonical(sign_said(SAID, SECRET)), b"no JSON", b'{"message_id": "../x", "seq": "3"}'):
        job = OutgoingRecord(f"job/{JOB_ID}", "ab" * 32, "mqtt", "unverified", JOB_EVENT, payload)
        agent = OutgoingRecord("agent/bo", "ab" * 32, "mqtt", "bo", AGENT_SAID, payload)
        for name, record in ((MQTT_JOB_RECEIPT, job), (MQTT_MESSAGE_RECEIPT, agent)):
            receipt = json.loads(receipt_of(record, *settled))
            assert is_valid(name, receipt), receipt
            assert not is_valid(MQTT_INBOX_MESSAGE, receipt)
            assert not is_valid(name, {**receipt, "verdict": "perhaps"})


@pytest.mark.long
@pytest.mark.requirement("CT-04")
def test_the_gateway_serves_the_files_without_a_token(app: Any) -> None:
    index = got(app, "/contracts").json()
    assert index["openapi"] == "/openapi.json"
    document = file_of(got(app, index["openapi"]).json())
    assert hashlib.sha256(document).hexdigest() == committed_digests()["openapi.json"]
    served = {
        path.removeprefix("/contracts/"): got(app, path) for path in (index["asyncapi"], *index["schemas"])
    }
    assert {path: answer.content for path, answer in served.items()} == contract_files(Settings())
    assert {answer.headers["content-type"] for answer in served.values()} == {"application/json"}


@pytest.mark.requirement("CT-04")
def test_a_copy_of_a_contract_is_confirmed_and_an_unknown_one_not_found(app: Any) -> None:
    first = got(app, "/contracts/asyncapi.json")
    again = got(app, "/contracts/asyncapi.json", **{"If-None-Match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    for path in ("schemas/job.painted.json", "schemas/job.event", "schemas/..%2Fasyncapi.json", "nothing"):
        assert got(app, f"/contracts/{path}").status_code == 404, path


@pytest.mark.long
@pytest.mark.requirement("CT-04")
def test_the_gateways_document_has_the_names_of_its_own_topics() -> None:
    own = {"mqtt": {"topic_prefix": "p/jobs"}, "kafka": {"topic": "own.events", "partitions": 7}}
    channels = got(application(Settings.model_validate(own)), "/contracts/asyncapi.json").json()["channels"]
    assert channels["jobEvents"]["address"] == "p/jobs/{job_id}/events"
    binding = channels["log"]["bindings"]["kafka"]
    assert (channels["log"]["address"], binding["partitions"]) == ("own.events", 7)


@pytest.mark.requirement("ST-90")
def test_the_routes_that_are_no_declared_operations_only_get_fewer(app: Any) -> None:
    routes = [route for route in app.routes if isinstance(route, AdmittedRoute)]
    names = {f"{method} {route.path}": route.endpoint for route in routes for method in route.methods}
    by_hand = {name for name, endpoint in names.items() if endpoint.__module__ != add_operation.__module__}
    print(f"{len(by_hand)} of {len(names)} operations by hand:", *sorted(by_hand), sep="\n")
    assert by_hand == set(BY_HAND)
    assert len(by_hand) <= BY_HAND_MOST
