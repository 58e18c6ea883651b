"""The Last Will of a job's publisher at Mosquitto, as the how-to page for other languages describes it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from paho.mqtt.client import Client
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from schemas.settings.settings import MqttSettings
from tests.broker_processes import LOOPBACK, BrokerProcess, wait_until
from tests.mqtt_wire import listening, publish_all
from trunkline_agent.mqtt.mqtt_client import connect_properties, cut_connection, dial, new_client

pytestmark = pytest.mark.requirement("JE-36")
Worker = Callable[..., Client]


@pytest.fixture
def mqtt(mosquitto_broker: BrokerProcess, request: pytest.FixtureRequest) -> MqttSettings:
    prefix = f"wills/{abs(hash(request.node.name))}"
    return MqttSettings(host=LOOPBACK, port=mosquitto_broker.port, topic_prefix=prefix)


@pytest.fixture
def worker(mqtt: MqttSettings) -> Iterator[Worker]:
    """Starts a worker with a will `error` on the events of its job."""
    started: list[Client] = []

    def start(client_id: str, *, delay_s: int = 0, clean_start: bool = False) -> Client:
        client = new_client(mqtt, client_id)
        started.append(client)
        properties = Properties(PacketTypes.WILLMESSAGE)
        properties.WillDelayInterval = delay_s
        client.will_set(f"{mqtt.topic_prefix}/0a1b2c3d/events", b"error", 1, properties=properties)
        dial(client, mqtt, connect_properties(600), clean_start=clean_start, keepalive_s=60)
        wait_until(client.is_connected, 10, "CONNACK")
        return client

    yield start
    for client in started:
        client.disconnect()
        cut_connection(client)


def cut(client: Client) -> None:
    """End the connection as the death of its process does."""
    client.socket().shutdown(socket.SHUT_RDWR)


def wills(mqtt: MqttSettings, act: Callable[[], object]) -> list[bytes]:
    """The wills that a subscriber gets because of `act`, which has come through when a later message has."""
    with listening(mqtt, "+/events") as found:
        act()
        publish_all(mqtt, [("0a1b2c3d/events", b"last")])
        wait_until(lambda: any(one.payload == b"last" for one in found), what="a later message")
        return [one.payload for one in found if one.payload != b"last"]


def test_a_worker_that_dies_ends_its_job_by_its_will(mqtt: MqttSettings, worker: Worker) -> None:
    client = worker("worker")
    with listening(mqtt, "+/events") as found:
        cut(client)
        wait_until(lambda: [one.payload for one in found] == [b"error"], 10, "the will")


def test_a_disconnect_publishes_no_will(mqtt: MqttSettings, worker: Worker) -> None:
    client = worker("worker")

    def end() -> None:
        client.disconnect()
        wait_until(lambda: not client.is_connected(), 10, "the end")

    assert wills(mqtt, end) == []


def test_the_same_id_that_comes_back_to_its_session_publishes_no_will(
    mqtt: MqttSettings, worker: Worker
) -> None:
    worker("worker")
    assert wills(mqtt, lambda: worker("worker")) == []


def test_a_clean_start_under_the_same_id_publishes_the_will_of_the_first(
    mqtt: MqttSettings, worker: Worker
) -> None:
    worker("worker")
    assert wills(mqtt, lambda: worker("worker", clean_start=True)) == [b"error"]


def test_a_worker_that_is_back_within_the_will_delay_publishes_no_will(
    mqtt: MqttSettings, worker: Worker
) -> None:
    client = worker("worker", delay_s=60)

    def come_back() -> None:
        cut(client)
        worker("worker", delay_s=60)

    assert wills(mqtt, come_back) == []


def test_another_id_does_not_keep_the_will_of_the_first_from_ending_the_job(
    mqtt: MqttSettings, worker: Worker
) -> None:
    first = worker("worker-1")
    worker("worker-2")
    with listening(mqtt, "+/events") as found:
        cut(first)
        wait_until(lambda: [one.payload for one in found] == [b"error"], 10, "the will of the first")
