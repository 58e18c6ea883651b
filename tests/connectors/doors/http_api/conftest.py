"""Fixtures of the gateway's tests: gateway processes on the session's Kafka, and a client of the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from connectors.log.publisher import Publisher
from schemas.settings.settings import Settings
from tests.broker_processes import BrokerProcess
from tests.connectors.doors.http_api.hub_access import GatewayProcess, starting
from tests.connectors.doors.http_api.hub_stack import HubStack, hub_settings


@pytest.fixture
def start_gateway(backbone_settings: Settings, tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """Starts gateways on free ports and waits until they serve; all end with the test."""
    with starting(GatewayProcess, backbone_settings, tmp_path) as start:
        yield start


@pytest.fixture
def gateway(start_gateway: Callable[..., GatewayProcess]) -> GatewayProcess:
    """One running gateway."""
    return start_gateway()


@pytest.fixture
def operator(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """A client with the operator's token."""
    with gateway.client() as client:
        yield client


@pytest.fixture(scope="module")
def hub(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStack]:
    """One stack per test file: `operator` at the first gateway, `other` (the operator, too) at the second."""
    folder = tmp_path_factory.mktemp("hub")
    stack = HubStack(hub_settings(kafka_broker, folder), folder)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture
def publisher(backbone_settings: Settings) -> Iterator[Publisher]:
    """A publisher beside the gateway."""
    with Publisher(backbone_settings) as found:
        yield found
