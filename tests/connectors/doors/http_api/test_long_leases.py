"""Readers that hold a message for too long are named by metrics and doctor, also if they extend the lease."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.cli.doctor import gateway
from connectors.cli.doctor.findings import OK, WARN
from schemas.settings.settings import Settings
from tests.broker_processes import BrokerProcess, wait_until
from tests.connectors.doors.http_api.hub_stack import HubStack, hub_settings, post
from trunkline_agent import Agent, Credentials, HubAccess

pytestmark = pytest.mark.requirement("AG-15")


@pytest.fixture(scope="module")
def stack(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStack]:
    """A gateway for which a second is too long."""
    folder = tmp_path_factory.mktemp("long-leases")
    settings = hub_settings(kafka_broker, folder)
    changed = settings.gateway.model_copy(update={"long_lease_s": 1.0})
    found = HubStack(settings.model_copy(update={"gateway": changed}), folder)
    try:
        found.start(1)
        yield found
    finally:
        found.close()


def settings_of(stack: HubStack) -> Settings:
    """The settings of a client of the gateway."""
    changed = stack.settings.gateway.model_copy(update={"url": stack.gateways[0].url})
    return stack.settings.model_copy(update={"gateway": changed})


def test_a_handler_that_hangs_is_named_with_its_mailbox_until_its_message_is_settled(
    stack: HubStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, token = stack.principal("worker")
    settings = settings_of(stack)
    monkeypatch.setattr(gateway, "is_started", lambda *_: True)
    check = gateway.CHECKS["handlers"]
    assert check(settings).level == OK
    for n in (1, 2):
        post(stack.operator, name, n)
    with Agent(name, Credentials(name, HubAccess(stack.gateways[0].url, token))) as agent:
        first = agent.receive(lease_s=1, wait_s=5)
        assert first is not None
        wait_until(lambda: check(settings).level == WARN, 10, "the lease is extended for too long")
        second = agent.receive(lease_s=60, wait_s=5)
        assert second is not None
        finding = check(settings)
        said = re.fullmatch(rf"http/{name} holds a message of default/{name} for (\d+) s", finding.found)
        assert finding.level == WARN and said is not None and 1 <= int(said[1]) < 30
        metrics = stack.operator.get("/metrics").text
        assert re.search(r"^trunkline_long_leases 1\.0$", metrics, re.MULTILINE)
        first.ack()
        second.ack()
    wait_until(lambda: check(settings).level == OK, 10, "the messages are settled")


def test_the_check_says_when_it_was_not_made(tmp_path: Path) -> None:
    finding = gateway.CHECKS["handlers"](Settings(data_dir=tmp_path))
    assert finding.level == OK and "not looked at" in finding.found
