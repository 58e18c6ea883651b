"""The client id of the bridge's session: no other account takes it over, and its change loses no message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from connectors.doors.mqtt_bridge.bridge_standby import has_session, session_ids
from connectors.plumbing.tls_keys.master_keys import rotate
from schemas.settings.settings import MqttSettings
from tests.broker_processes import wait_until, with_mqtt
from tests.mqtt_wire import publish_all
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription

JOB = "0a1b2c3d"
EVENTS = f"{JOB}/events"
pytestmark = pytest.mark.requirement("JE-30")


@contextmanager
def intruder(mqtt: MqttSettings, client_id: str, pause_s: float = 0.02) -> Iterator[list[int]]:
    """Another client that connects under this client id with a clean start, again and again."""
    connects: list[int] = []
    end = threading.Event()

    def connect() -> None:
        while not end.wait(pause_s):
            connection = MqttConnection(mqtt, client_id=client_id)
            with suppress(BackboneUnreachable):
                connection.open()
                connects.append(1)
            connection.drop()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield connects
    finally:
        end.set()
        thread.join(20)


def test_a_client_that_connects_under_the_bridges_name_takes_no_event(
    backbone_settings, start_bridge, read_topic
):
    bridge = start_bridge()
    messages = [(EVENTS, b"%d" % number) for number in range(200)]
    with intruder(backbone_settings.mqtt, backbone_settings.mqtt.bridge_client_id) as connects:
        for at in range(0, 200, 20):
            seen = len(connects)
            publish_all(backbone_settings.mqtt, messages[at : at + 20])
            wait_until(lambda seen=seen: len(connects) > seen, what="another connection of the intruder")
        records = read_topic(200)
    assert [record.value for record in records] == [payload for _, payload in messages]
    assert "connection_lost" not in bridge.log()


def test_messages_queued_under_an_earlier_client_id_come_first_and_its_session_ends(
    backbone_settings, start_bridge, read_topic
):
    mqtt = backbone_settings.mqtt
    former = MqttConnection(
        mqtt,
        [Subscription(f"{mqtt.topic_prefix}/+/events")],
        client_id=mqtt.bridge_client_id,
        session_expiry_s=600,
        manual_ack=True,
    )
    former.open()
    former.close()
    messages = [(EVENTS, b"%d" % number) for number in range(3000)]
    publish_all(mqtt, messages)
    start_bridge()
    publish_all(mqtt, [(EVENTS, b"last")])
    records = read_topic(3001)
    assert list(dict.fromkeys(record.value for record in records)) == [*(one for _, one in messages), b"last"]
    assert not has_session(mqtt, mqtt.bridge_client_id)
    assert has_session(mqtt, session_ids(backbone_settings)[0])


def test_after_a_rotation_of_the_master_key_the_earlier_id_is_still_known(backbone_settings):
    before = session_ids(backbone_settings)
    rotate(backbone_settings)
    after = session_ids(backbone_settings)
    assert after[1:] == before
    assert after[0] not in before


def test_the_id_ends_with_128_bits_and_differs_by_broker_and_by_keys(backbone_settings, tmp_path):
    one, name = session_ids(backbone_settings)
    assert name == backbone_settings.mqtt.bridge_client_id
    assert len(bytes.fromhex(one.removeprefix(f"{name}."))) == 16
    assert session_ids(backbone_settings, "example.org:1883")[0] != one
    assert session_ids(with_mqtt(backbone_settings, bridge_client_id="other"))[0] != one
