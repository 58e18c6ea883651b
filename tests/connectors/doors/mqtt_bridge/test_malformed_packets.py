"""Packets that no broker should send: each is skipped or refused, acknowledged, and the next one is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest

from connectors.doors.mqtt_bridge.connection import BridgeConnection, Tally
from connectors.log.publisher import Publisher
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import MqttSettings, Settings
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import LOOPBACK, wait_until
from tests.hostile_broker import HostileBroker, packet, publish, text
from tests.mailbox_credentials import mailbox_credentials
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("JE-32")
PREFIX = b"python/mqtt/jobs"
TOPIC = PREFIX + b"/0a1b2c3d/events"
MID = 7


def user_property(name: bytes, value: bytes) -> bytes:
    return b"\x26" + text(name) + text(value)


def with_properties(properties: bytes, *, said: int | None = None) -> bytes:
    size = bytes([len(properties) if said is None else said])
    return publish(TOPIC, b"bad", MID, properties=size + properties)


# The packet, and whether its packet id can be read, so that the bridge acknowledges it.
PUBLISHES = {
    "a topic that is not UTF-8": (publish(PREFIX + b"/\xff\xfe/events", b"bad", MID), True),
    "a topic with a surrogate": (publish(PREFIX + b"/\xed\xa0\x80/events", b"bad", MID), True),
    "a topic with NUL": (publish(PREFIX + b"/0a1b\x002c/events", b"bad", MID), True),
    "a topic with wildcards": (publish(PREFIX + b"/+/events", b"bad", MID), True),
    "an empty topic": (publish(b"", b"bad", MID), True),
    "a very long topic": (publish(b"x" * 65535, b"bad", MID), True),
    "a topic alias that is not known": (publish(b"", b"bad", MID, properties=b"\x03\x23\x00\x05"), True),
    "topic alias 0": (with_properties(b"\x23\x00\x00"), True),
    "an unknown property": (with_properties(b"\x7f\x00"), True),
    "a property of another packet": (with_properties(b"\x11\x00\x00\x00\x01"), True),
    "a property twice": (with_properties(b"\x02\x00\x00\x00\x01" * 2), True),
    "a user property that is not UTF-8": (with_properties(user_property(b"\xff", b"\xfe")), True),
    "a traceparent that is not UTF-8": (with_properties(user_property(b"traceparent", b"\xff")), True),
    "a traceparent with NUL": (with_properties(user_property(b"traceparent", b"\x00")), True),
    "a user property without its value": (with_properties(b"\x26" + text(b"name")), True),
    "properties longer than the packet": (with_properties(b"", said=100), True),
    "a length of properties without an end": (publish(TOPIC, b"", MID, properties=b"\xff" * 6), True),
    "no properties at all": (publish(TOPIC, b"", MID, properties=b""), True),
    "payload format 9": (with_properties(b"\x01\x09"), True),
    "QoS 3": (publish(TOPIC, b"bad", MID, first=0x36), True),
    "QoS 0 with the dup flag": (packet(0x38, text(TOPIC) + b"\x00bad"), False),
    "packet id 0": (publish(TOPIC, b"bad", 0), False),
    "no packet id": (packet(0x32, text(TOPIC)), False),
    "half a packet id": (packet(0x32, text(TOPIC) + b"\x00"), False),
    "a topic longer than the packet": (packet(0x32, b"\xff\xff" + TOPIC), False),
    "no body": (packet(0x32, b""), False),
    "one byte": (packet(0x32, b"\x00"), False),
    "an empty event": (publish(TOPIC, b"", MID), True),
    "a payload of a megabyte": (publish(TOPIC, b"x" * 2**20, MID), True),
}
OTHERS = {
    **{f"a packet of type {kind}": packet(kind << 4, b"\x00\x01\x00") for kind in (0, 1, 8, 10, 12, 15)},
    **{f"a malformed packet of type {kind}": packet(kind << 4, b"\xff") for kind in (4, 5, 6, 7, 9, 11)},
    **{f"an empty packet of type {kind}": packet(kind << 4, b"") for kind in (4, 5, 6, 7, 9, 11)},
    "a PUBACK with an unknown reason": packet(0x40, b"\x00\x63\xee\x00"),
    "a PUBACK with a wrong property": packet(0x40, b"\x00\x63\x00\x02\x7f\x00"),
    "a PUBACK of nothing": packet(0x40, b"\x00\x63"),
    "a PUBREL of nothing": packet(0x62, b"\x00\x63"),
    "a PINGRESP with a body": packet(0xD0, b"\x00\x00"),
    "a SUBACK of nothing": packet(0x90, b"\x00\x63\x00\xee"),
    "a second CONNACK": packet(0x20, b"\x00\x00\x00"),
}


class Log:
    """Takes the bridge's records in place of Kafka."""

    def __init__(self) -> None:
        self.records: list[OutgoingRecord] = []

    def append(self, record: OutgoingRecord) -> Future[tuple[int, int]]:
        self.records.append(record)
        done: Future[tuple[int, int]] = Future()
        done.set_result((0, len(self.records)))
        return done


def settings_at(broker: HostileBroker, folder: Path) -> Settings:
    mqtt = MqttSettings(host=LOOPBACK, port=broker.port, connect_timeout_s=30)
    settings = Settings(data_dir=folder, mqtt=mqtt)
    ensure_keyring(settings)
    return settings


@pytest.fixture
def started() -> Iterator[Callable[[list[bytes]], HostileBroker]]:
    brokers: list[HostileBroker] = []

    def start(script: list[bytes]) -> HostileBroker:
        brokers.append(HostileBroker(script, lambda subscribe: b"/bridge/" not in subscribe))
        return brokers[-1]

    yield start
    for broker in brokers:
        broker.close()


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Callable[[HostileBroker], tuple[BridgeConnection, Log, Tally]]]:
    opened: list[BridgeConnection] = []

    def start(broker: HostileBroker) -> tuple[BridgeConnection, Log, Tally]:
        log, tally = Log(), Tally()
        verdicts = Mock(ask=lambda _position, answer, _late: answer(None, None))
        publisher = Mock(spec=Publisher, append=log.append)
        connection = BridgeConnection(settings_at(broker, tmp_path), publisher, tally, set(), verdicts)
        opened.append(connection)
        connection.open()
        return connection, log, tally

    yield start
    for connection in opened:
        connection.drop()


@pytest.mark.parametrize("name", PUBLISHES)
def test_after_a_publish_that_is_wrong_the_bridge_takes_the_next_event(name, started, bridge):
    bad, is_acknowledged = PUBLISHES[name]
    broker = started([bad, publish(TOPIC, b"good", 8)])
    connection, log, tally = bridge(broker)
    wait_until(lambda: 8 in broker.acknowledged, 10, "the acknowledgement of the good event")
    assert not connection.lost.is_set()
    # In the order of the messages, and each packet id once: one with the id 0 cannot be acknowledged.
    assert broker.acknowledged == ([7, 8] if is_acknowledged else [8])
    assert len(log.records) == 2
    assert b"good" in {one.value for one in log.records}
    assert tally.snapshot()["received"] == 2


def test_after_any_other_packet_that_is_wrong_the_bridge_takes_the_next_event(started, bridge):
    mids = itertools.count(1)
    script = [one for bad in OTHERS.values() for one in (bad, publish(TOPIC, b"good", next(mids)))]
    broker = started(script)
    connection, log, _ = bridge(broker)
    wait_until(lambda: len(broker.acknowledged) == len(OTHERS), 10, "all good events")
    assert not connection.lost.is_set()
    assert broker.connects == 1
    assert [one.value for one in log.records] == [b"good"] * len(OTHERS)


def test_records_of_what_cannot_be_read_are_refused_and_have_its_bytes(started, bridge):
    topic = PREFIX + b"/\xff\xfe/events"
    wrong = with_properties(b"\x7f\x00")
    broker = started([publish(topic, b"one", 1), wrong, publish(TOPIC, b"", 3)])
    _, log, tally = bridge(broker)
    wait_until(lambda: len(log.records) == 3, 10, "three records")
    found = {one.stream: [] for one in log.records}
    for one in log.records:
        found[one.stream].append(one.value)
    assert found == {"refused/mqtt": [b"one", b"\x02\x7f\x00bad"], "job/0a1b2c3d": [b""]}
    assert tally.snapshot()["refused"] == 2


@pytest.mark.requirement("JE-33")
def test_the_removal_of_a_retained_message_is_no_event_and_is_acknowledged(started, bridge):
    broker = started([publish(TOPIC, b"", 1, first=0x33), publish(TOPIC, b"good", 2)])
    _, log, tally = bridge(broker)
    wait_until(lambda: broker.acknowledged == [1, 2], 10, "both acknowledgements")
    assert [one.value for one in log.records] == [b"good"]
    assert tally.snapshot()["cleared"] == 1


def test_a_message_that_cannot_be_read_is_not_sent_again_on_the_next_connection(started, bridge):
    broker = started([publish(b"\xff", b"bad", 7), with_properties(b"\x7f"), publish(TOPIC, b"good", 8)])
    first, _, _ = bridge(broker)
    wait_until(lambda: 8 in broker.acknowledged, 10, "the good event")
    first.drop()
    broker.script.append(publish(TOPIC, b"better", 9))
    _, log, _ = bridge(broker)
    wait_until(lambda: 9 in broker.acknowledged, 10, "the event of the next connection")
    assert [one.value for one in log.records] == [b"better"]


@pytest.mark.parametrize("manual_ack", [True, False])
def test_any_connection_skips_and_acknowledges_what_cannot_be_read(started, tmp_path, manual_ack):
    bad = [bad for bad, is_acknowledged in PUBLISHES.values() if is_acknowledged]
    broker = started([*bad, publish(TOPIC, b"good", 8)])
    found: list[bytes] = []

    def take(message):
        assert isinstance(message.topic, str)  # an empty topic is text, too
        found.append(bytes(message.payload))
        if manual_ack:
            connection.ack(message.mid, message.qos)

    mqtt = settings_at(broker, tmp_path).mqtt
    connection = MqttConnection(mqtt, [Subscription("#")], manual_ack=manual_ack, on_message=take)
    try:
        connection.open()
        wait_until(lambda: 8 in broker.acknowledged, 10, "the good message")
        assert found[-1] == b"good"
        assert broker.acknowledged.count(MID) == len(bad)
        assert not connection.lost.is_set()
    finally:
        connection.drop()


def test_an_agent_receives_the_message_behind_one_that_cannot_be_read(started, tmp_path):
    fields = {"message_id": "m-1", "from": "hub", "from_verified": True, "kind": "k", "body": "b"}
    bad = [bad for bad, _ in PUBLISHES.values()]
    broker = started([*bad, publish(b"python/mqtt/agents/ann/inbox", canonical(fields), 8)])
    settings = settings_at(broker, tmp_path)
    found: list[str] = []
    credentials = mailbox_credentials(settings, "ann", "a secret")
    with MqttAgent(credentials, tmp_path / "state", lambda message: found.append(message.message_id)):
        wait_until(lambda: found, 10, "the message")
    assert broker.connects == 1
