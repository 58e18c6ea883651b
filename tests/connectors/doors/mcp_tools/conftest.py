"""Fixtures of the agent MCP door's tests: gateways that have the door, agents with keys, official clients."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import GatewaySettings, MqttSettings, Settings
from tests.broker_processes import LOOPBACK, BrokerProcess, free_port, kafka_at
from tests.connectors.doors.http_api.hub_access import GatewayProcess, starting
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller
from tests.own_settings import make_topic
from trunkline_agent.mcp import agent_client
from trunkline_agent.mcp.signing import KEY_BITS, new_key_pair, private_key_pem, public_pem

PARTICIPANTS = "/api/hub/participants"
# A host name of the shared gateway, besides those that each gateway has.
FURTHER_NAME = "trunk.test"


class McpGateway(GatewayProcess):
    """A running gateway with the agent MCP door."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        door = settings.agent_mcp.model_copy(update={"port": free_port()})
        super().__init__(settings.model_copy(update={"agent_mcp": door}), folder)
        self.mcp_url = f"http://{LOOPBACK}:{door.port}"


class Agent:
    """An agent that takes part: its name and where its private key lies."""

    def __init__(self, name: str, folder: Path, bits: int = KEY_BITS[0]) -> None:
        self.name = name
        self.key_path = folder / f"{name}.pem"
        private, self.public_key = new_key_pair() if bits == KEY_BITS[0] else key_pair_of(bits)
        self.key_path.touch(mode=0o600)
        self.key_path.write_bytes(private)

    def client(self, gateway: McpGateway, transport: Any = "http") -> Any:
        """The official client, signed for this agent."""
        return agent_client(gateway.mcp_url, self.name, self.key_path, transport=transport)

    def joined(self, operator: httpx.Client, **fields: Any) -> Agent:
        """Let it take part."""
        body = {"agent_name": self.name, "public_key": self.public_key, "task": "is tested", **fields}
        answer = operator.post(PARTICIPANTS, json=body)
        assert answer.status_code == 201, answer.text
        return self


def key_pair_of(bits: int) -> tuple[bytes, str]:
    """A key pair that is longer than ours."""
    private_key = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    return private_key_pem(private_key).encode("ascii"), public_pem(private_key)


@pytest.fixture
def start_gateway(backbone_settings: Settings, tmp_path: Path) -> Iterator[Callable[..., McpGateway]]:
    """Starts gateways on free ports and waits until they serve; all end with the test."""
    with starting(McpGateway, backbone_settings, tmp_path) as start:
        yield start


@pytest.fixture
def gateway(start_gateway: Callable[..., McpGateway]) -> McpGateway:
    """One running gateway."""
    return start_gateway()


@pytest.fixture(scope="module")
def shared_gateway(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[McpGateway]:
    """One running gateway for all tests of a file, which take agents of their own names."""
    folder = tmp_path_factory.mktemp("shared")
    settings = Settings(
        data_dir=folder / "data",
        kafka=kafka_at(kafka_broker.port, topic=f"test.{uuid.uuid4().hex[:12]}"),
        mqtt=MqttSettings(host=LOOPBACK, port=mosquitto_broker.port),
        gateway=GatewaySettings(host_names=FURTHER_NAME),
    )
    ensure_keyring(settings)
    make_topic(settings)
    gateway = McpGateway(settings, folder)
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.program.kill()


@pytest.fixture(scope="module")
def other_gateway(shared_gateway: McpGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[McpGateway]:
    """A second gateway on the log of the shared one."""
    gateway = McpGateway(shared_gateway.settings, tmp_path_factory.mktemp("other"))
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.program.kill()


@pytest.fixture(scope="module")
def new_agent(
    shared_gateway: McpGateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Agent]]:
    """Lets agents take part at the shared gateway, each under a name that nobody has."""
    folder, numbers = tmp_path_factory.mktemp("keys"), itertools.count(1)
    with shared_gateway.client() as operator:
        yield lambda name: Agent(f"{name}-{next(numbers)}", folder).joined(operator)


@pytest.fixture
def calls_as(shared_gateway: McpGateway) -> Iterator[Callable[[Agent], SignedCaller]]:
    """Gives an agent's client at the shared gateway."""
    with ExitStack() as open_clients:
        yield lambda agent: open_clients.enter_context(SignedCaller(agent, shared_gateway))


@pytest.fixture
def new_caller(
    calls_as: Callable[[Agent], SignedCaller], new_agent: Callable[[str], Agent]
) -> Callable[[str], SignedCaller]:
    """Lets an agent take part and gives its client."""
    return lambda name: calls_as(new_agent(name))


@pytest.fixture
def operator(gateway: McpGateway) -> Iterator[httpx.Client]:
    """A client with the operator's token."""
    with gateway.client() as client:
        yield client
