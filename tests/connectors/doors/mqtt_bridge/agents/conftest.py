"""One gateway and one bridge for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schemas.keys.sealing import load_keyring
from tests.broker_processes import BrokerProcess
from tests.connectors.doors.mqtt_bridge.agents.mail_run import MailRun
from tests.own_settings import own_settings


@pytest.fixture(scope="module")
def run(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MailRun]:
    """Gateway and bridge over a topic of their own."""
    folder = tmp_path_factory.mktemp("mail")
    settings = own_settings(kafka_broker, mosquitto_broker, folder)
    found = MailRun(settings, load_keyring(settings), folder)
    try:
        yield found
    finally:
        found.close()
