"""Messages that the broker drops after their PUBACK: in the gateway's metrics and in the doctor's findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.cli.doctor.brokers import check_queue
from connectors.cli.doctor.findings import OK, WARN
from connectors.hub.services.table_metrics import BridgeWatch
from connectors.plumbing.mqtt_link.payloads import dropped_messages, read_figure
from schemas.settings.settings import MqttSettings, Settings
from tests.broker_processes import LOOPBACK, make_mosquitto, wait_until
from tests.mqtt_wire import publish_all
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription

pytestmark = [pytest.mark.requirement("JE-35"), pytest.mark.mosquitto]
EVENTS = "0a1b2c3d/events"


def settings_at(port: int, folder: Path) -> Settings:
    return Settings(data_dir=folder / "data", mqtt=MqttSettings(host=LOOPBACK, port=port, connect_timeout_s=5))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A Mosquitto whose queues hold little."""
    folder = tmp_path_factory.mktemp("small")
    broker = make_mosquitto(folder, "sys_interval 1\nmax_queued_bytes 20000\n")
    broker.start()
    yield settings_at(broker.port, folder)
    broker.kill()


def samples(watch: BridgeWatch) -> dict[str, float]:
    return {one.name: one.value for family in watch.collect() for one in family.samples}


def test_messages_that_the_broker_drops_while_the_bridge_is_away_are_counted_and_reported(
    settings: Settings,
) -> None:
    mqtt, watch = settings.mqtt, BridgeWatch(settings)
    filters = [Subscription(f"{mqtt.topic_prefix}/+/events")]
    bridge = MqttConnection(mqtt, filters, client_id="away", session_expiry_s=600)
    bridge.open()
    bridge.close()
    watch.open()
    try:
        name = "trunkline_mqtt_dropped_messages_total"
        wait_until(lambda: samples(watch).get(name) == 0, 10, "the figure before")
        assert check_queue(settings).level == OK
        publish_all(mqtt, [(EVENTS, b"x" * 1000)] * 200)
        wait_until(lambda: samples(watch)[name] > 100, 10, "the dropped messages")
        found = samples(watch)
        assert found["trunkline_mqtt_stored_bytes"] >= 1000
    finally:
        watch.close()
    finding = check_queue(settings)
    assert finding.level == WARN
    assert f"dropped {int(found[name])} messages" in finding.found
    assert "trunkline logs mosquitto" in finding.mend


def test_a_broker_that_publishes_no_figures_leaves_them_unknown(tmp_path: Path) -> None:
    broker = make_mosquitto(tmp_path, "sys_interval 0\n")
    broker.start()
    try:
        settings = settings_at(broker.port, tmp_path)
        assert dropped_messages(settings.mqtt, 0.2) is None
        finding = check_queue(settings)
    finally:
        broker.kill()
    assert (finding.level, finding.found.partition(":")[0]) == (OK, "unknown")
    assert check_queue(settings).level == WARN  # it does not answer


def test_a_figure_is_a_number_of_digits_alone() -> None:
    assert read_figure(b"42") == 42
    wrong = (b"", b"-1", b"1.5", b"x", b"\xff", b"9" * 21, "²".encode())
    assert {read_figure(one) for one in wrong} == {None}
