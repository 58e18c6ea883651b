"""The agent MCP door while Kafka is away: answers in time, nothing done twice; and bodies that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from connectors.doors.mcp_tools.agents.door import AgentMcp
from connectors.hub.live.live_view import LiveView
from connectors.hub.services.hub import Hub
from connectors.hub.serving import strict_request
from connectors.log.kafka_topic import ensure_topic
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import GatewaySettings, Settings
from tests.broker_processes import BrokerProcess, kafka_at, make_kafka, wait_until
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body, open_stream

SETTLE_S = 1.5


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A Kafka that this test may stop."""
    broker = make_kafka(tmp_path / "kafka")
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def settings(own_kafka: BrokerProcess, tmp_path: Path) -> Settings:
    """Settings that point at it."""
    found = Settings(
        data_dir=tmp_path / "data",
        kafka=kafka_at(own_kafka.port, topic="test.outage", delivery_timeout_s=5),
        gateway=GatewaySettings(settle_timeout_s=SETTLE_S),
    )
    ensure_keyring(found)
    ensure_topic(found)
    return found


@pytest.mark.requirement("AM-04")
def test_while_kafka_is_away_changes_are_refused_in_time_and_reading_goes_on(
    start_gateway: Callable[..., McpGateway], own_kafka: BrokerProcess, settings: Settings, tmp_path: Path
) -> None:
    gateway = start_gateway(settings)
    with gateway.client() as operator:
        agent = Agent("ann", tmp_path).joined(operator)
    with SignedCaller(agent, gateway) as ann:
        ann.call("send_to_agent", targetAgentId="ann", message="before")
        for number, outage in enumerate((own_kafka.standing_still, own_kafka.away)):
            call = {"targetAgentId": "ann", "message": f"during {number}", "idempotencyKey": f"k{number}"}
            with open_stream(ann) as stream, outage():
                for _ in range(3):
                    began = time.monotonic()
                    answer = ann.post(call_body("send_to_agent", **call))
                    assert time.monotonic() - began < SETTLE_S + 5
                    assert (answer.status_code, answer.json()["reason"]) == (503, "unreachable")
                    assert "Retry-After" in answer.headers
                # Also where the answer would come on a stream, it comes at once.
                assert ann.post(call_body("update_my_status"), path=stream.path).status_code == 503
                assert ann.messages()[0]["content"] == "before"
                assert ann.call("discover_agents")["agents"]

            def is_back(call: dict[str, Any] = call) -> bool:
                return ann.post(call_body("send_to_agent", **call)).status_code == 200

            wait_until(is_back, 60, "Kafka")
            assert ann.post(call_body("send_to_agent", **call)).status_code == 200
            # Sent three times in vain and twice or more in earnest, with one key.
            assert [one["content"] for one in ann.messages()].count(f"during {number}") == 1


async def asked(app: Any, receive: Callable[[], Any], headers: dict[str, str]) -> tuple[int, bytes]:
    """The answer of an ASGI application to `POST /mcp`."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    with anyio.fail_after(20):
        await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.requirement("AM-02")
def test_a_body_that_does_not_come_or_breaks_off_is_not_waited_for(
    backbone_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_request, "BODY_TIMEOUT_S", 0.1)
    keyring = ensure_keyring(backbone_settings)
    door = AgentMcp(Hub(backbone_settings, keyring, "token", LiveView(backbone_settings, keyring)))

    async def half() -> dict[str, Any]:
        if given:
            return await anyio.sleep_forever()  # type: ignore[func-returns-value]
        given.append(True)
        return {"type": "http.request", "body": b'{"jsonrpc"', "more_body": True}

    async def broken() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    given: list[bool] = []
    status, body = anyio.run(asked, door.app, half, {})
    assert (status, b"request_timeout" in body) == (408, True)
    status, body = anyio.run(asked, door.app, broken, {})
    assert (status, b"ended too early" in body) == (400, True)
    status, body = anyio.run(asked, door.app, half, {"Content-Length": str(10**9)})
    assert (status, b"too_large" in body) == (413, True)
