"""One topic, subscribers at three doors and two gateways: each gets each message once (DL-24, CM-07)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from schemas.settings.settings import Settings
from tests.broker_processes import ProgramProcess, wait_until
from tests.connectors.doors.http_api.hub_access import add_principal, starting
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import called, known_at
from tests.mailbox_credentials import mailbox_credentials
from trunkline_agent import Agent as HubAgent
from trunkline_agent import Credentials
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import Refused
from trunkline_agent.message import Message
from trunkline_agent.mqtt.inbox_receiver import InboxMessage
from trunkline_agent.mqtt.mqtt_agent import MqttAgent

pytestmark = [pytest.mark.requirement("DL-24"), pytest.mark.kafka, pytest.mark.mosquitto]

TOPICS = "/api/hub/topics"


@pytest.fixture
def gateways(backbone_settings: Settings, tmp_path: Path) -> Iterator[list[McpGateway]]:
    """Two gateways with the MCP door."""
    own = backbone_settings.gateway.model_copy(update={"reactor_group": backbone_settings.kafka.topic})
    settings = backbone_settings.model_copy(update={"gateway": own})
    with starting(McpGateway, settings, tmp_path) as start:
        yield [start(), start()]


def mqtt_agent(gateway: McpGateway, folder: Path, found: list[InboxMessage]) -> MqttAgent:
    """An agent over MQTT, which is not open yet."""
    with gateway.client() as operator:
        told = operator.post("/api/hub/agents/mina/mqtt", json={}).json()
    credentials = mailbox_credentials(gateway.settings, "mina", told["secret"])
    return MqttAgent(credentials, folder / "mqtt", found.append, broker=gateway.settings.mqtt)


def hub_agent(gateway: McpGateway, name: str, token: str) -> HubAgent:
    """An agent over HTTP at one gateway."""
    return HubAgent(name, Credentials(name, HubAccess(gateway.url, token)))


def is_known(agent: HubAgent) -> bool:
    """Return whether the gateway of an agent without messages knows it."""
    try:
        return agent.receive(lease_s=None, wait_s=0) is None
    except Refused:
        return False


async def tool(agent: Agent, gateway: McpGateway, name: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool as this agent."""
    async with agent.client(gateway) as client:
        return await called(client, name, **arguments)


@pytest.mark.requirement("CM-07")
@pytest.mark.requirement("JE-26")
def test_subscribers_at_three_doors_get_each_message_once(
    gateways: list[McpGateway], start_bridge: Callable[..., ProgramProcess], tmp_path: Path
) -> None:
    first, second = gateways
    start_bridge(first.settings)
    came: list[InboxMessage] = []
    with ExitStack() as opened:
        operator, other = (opened.enter_context(one.client()) for one in gateways)
        publishers = [opened.enter_context(hub_agent(one, "operator", one.operator_token)) for one in gateways]
        token = add_principal(operator, "hanna", "worker")
        hanna = opened.enter_context(hub_agent(second, "hanna", token))
        wait_until(lambda: is_known(hanna), what="hanna is known at both")
        mara = Agent("mara", tmp_path).joined(operator)
        known_at(second, mara)
        opened.enter_context(mqtt_agent(first, tmp_path, came))
        wait_until(
            lambda: other.post(f"{TOPICS}/news/subscribe", json={"subscriber": "mina"}).is_success,
            what="mina is known at the second gateway",
        )
        hanna.subscribe("news")
        assert anyio.run(lambda: tool(mara, second, "subscribe", topic="news"))["subscribed"]
        ids = []
        for number in range(10):
            published = publishers[number % 2].publish("news", "note", {"text": str(number)})
            assert published.recipients == 3
            ids.append(published.message_id)
        sent = anyio.run(lambda: tool(mara, first, "publish_message", topic="news", message="by a tool"))
        ids.append(sent["messageId"])
        expected = Counter(ids)
        over_http: list[Message] = []

        def drain() -> int:
            over_http.extend(hanna.messages(limit=100, lease_s=None, wait_s=1))
            return len(over_http)

        wait_until(lambda: drain() >= len(ids), 30, "all messages over HTTP")
        wait_until(lambda: len(came) >= len(ids), 30, "all messages over MQTT")
        by_tool = anyio.run(lambda: tool(mara, second, "get_my_messages", limit=1000))["messages"]
        assert {one.topic for one in over_http} | {one["topic"] for one in by_tool} == {"news"}
        assert Counter(one.fields["broadcast_id"] for one in came) == expected
        assert {one.fields["topic"] for one in came} == {"news"}
        assert len(over_http) == len(by_tool) == len(ids)
        for name in ("hanna", "mara", "mina"):
            rows = other.get(f"/api/hub/mailboxes/default/{name}", params={"limit": 100}).json()["messages"]
            assert Counter(row["broadcast_id"] for row in rows) == expected
