"""Fixtures of the library's tests: one gateway per file, and agents of it, sync and async alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.broker_processes import BrokerProcess
from tests.connectors.agent_sdk.agent_runners import AGENTS
from tests.connectors.doors.http_api.hub_stack import HubStack, hub_settings
from trunkline_agent.credentials import Credentials, HubAccess


@pytest.fixture(scope="module")
def hub(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStack]:
    """One gateway per test file, with `operator`, a client of the operator."""
    folder = tmp_path_factory.mktemp("hub")
    stack = HubStack(hub_settings(kafka_broker, folder), folder)
    try:
        stack.start(1)
        yield stack
    finally:
        stack.close()


@pytest.fixture(params=AGENTS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of the agents: sync or async."""
    return str(request.param)


@pytest.fixture
def joined(hub: HubStack, kind: str) -> Iterator[Callable[..., Any]]:
    """Makes agents with a mailbox of their own; each is closed with the test."""
    with ExitStack() as opened:

        def join(role: str = "worker", credentials: Credentials | None = None, **options: Any) -> Any:
            if credentials is None:
                name, token = hub.principal(role)
                credentials = Credentials(name, HubAccess(hub.gateways[0].url, token))
            agent = AGENTS[kind](credentials, **options)
            opened.callback(agent.close)
            return agent

        yield join
