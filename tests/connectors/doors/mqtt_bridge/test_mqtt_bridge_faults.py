"""The bridge when something breaks: nothing is lost, nothing overtakes, nothing is acknowledged too early."""

from __future__ import annotations

import json
import signal
import threading
import time
from unittest.mock import Mock

import pytest

from connectors.doors.mqtt_bridge.connection import BridgeConnection, Tally
from connectors.log.publisher import Publisher
from connectors.tools.conformance.mqtt_proxy import DOWN, PUBACK, PUBLISH, UP, MqttProxy
from tests.broker_processes import LOOPBACK, wait_until, with_kafka, with_mqtt
from tests.mqtt_wire import publish_all
from trunkline_agent.mqtt.ack_window import AckWindow

JOB = "0a1b2c3d"
EVENTS = f"{JOB}/events"
pytestmark = pytest.mark.requirement("JE-18")


@pytest.fixture
def proxy(mosquitto_broker):
    found = MqttProxy(LOOPBACK, mosquitto_broker.port)
    yield found
    found.close()


def _first_seen(records, job_id=JOB):
    return list(dict.fromkeys(r.value for r in records if r.key == f"job/{job_id}".encode()))


@pytest.mark.requirement("CM-03")
@pytest.mark.requirement("CM-04")
def test_a_bridge_killed_between_kafkas_ack_and_its_own_delivers_again_under_the_same_id(
    backbone_settings, start_bridge, read_topic, proxy
):
    bridge = start_bridge(with_mqtt(backbone_settings, port=proxy.port))
    proxy.hold(UP, PUBACK)
    publish_all(backbone_settings.mqtt, [(EVENTS, b"once")])
    wait_until(lambda: proxy.count(UP, PUBACK), what="the bridge's acknowledgement, held back")
    bridge.stop(signal.SIGKILL)
    proxy.cut()
    start_bridge()
    records = read_topic(2)
    assert [r.value for r in records] == [b"once", b"once"]
    assert len({dict(r.headers)["ce_id"] for r in records}) == 1


def test_messages_wait_at_the_broker_while_the_bridge_is_down(backbone_settings, start_bridge, read_topic):
    start_bridge().stop()
    messages = [(EVENTS, b"%d" % n) for n in range(2000)]
    publish_all(backbone_settings.mqtt, messages)
    start_bridge()
    assert [r.value for r in read_topic(2000)] == [payload for _, payload in messages]


def test_the_bridge_outlives_a_restart_of_the_mqtt_broker(
    backbone_settings, start_bridge, read_topic, mosquitto_broker
):
    bridge = start_bridge()
    publish_all(backbone_settings.mqtt, [(EVENTS, b"before")])
    read_topic(1)
    mosquitto_broker.stop()
    mosquitto_broker.start()
    # Published before the bridge is back: the session has outlived the restart.
    publish_all(backbone_settings.mqtt, [(EVENTS, b"after")])
    assert _first_seen(read_topic(2)) == [b"before", b"after"]
    assert bridge.process.poll() is None
    wait_until(lambda: bridge.log().count('"subscribed"') == 2, what="a second subscription")


@pytest.mark.requirement("CM-03")
def test_while_kafka_is_down_nothing_is_acknowledged_nothing_lost_and_the_order_kept(
    backbone_settings, start_bridge, read_topic, kafka_broker, proxy
):
    settings = with_mqtt(with_kafka(backbone_settings, delivery_timeout_s=2), port=proxy.port)
    bridge = start_bridge(settings)
    publish_all(backbone_settings.mqtt, [(EVENTS, b"0")])
    wait_until(lambda: proxy.count(UP, PUBACK) == 1, what="the first acknowledgement")
    with kafka_broker.away():
        jobs = [JOB, "11111111", "22222222", "33333333"]
        messages = [(f"{job}/events", b"%d" % n) for n in range(1, 100) for job in jobs]
        publish_all(backbone_settings.mqtt, messages[:200])
        wait_until(lambda: "connection_lost" in bridge.log(), 30, "the bridge gives the connection up")
        publish_all(backbone_settings.mqtt, messages[200:])
        wait_until(lambda: "unreachable" in bridge.log(), 30, "an attempt that fails")
        assert proxy.count(UP, PUBACK) == 1
    records = read_topic(len(messages) + 1, timeout_s=60)
    for job in jobs:
        wanted = [b"%d" % n for n in range(0 if job == JOB else 1, 100)]
        assert _first_seen(records, job) == wanted
    wait_until(lambda: proxy.count(UP, PUBACK) == len(messages) + 1, what="all acknowledged")
    assert bridge.process.poll() is None


def test_a_retained_end_does_not_come_again_with_each_connection(backbone_settings, start_bridge, read_topic):
    bridge = start_bridge()
    publish_all(backbone_settings.mqtt, [(EVENTS, b"completed")], retain=True)
    read_topic(1)
    for number in range(2):
        assert bridge.stop() == 0
        bridge = start_bridge()
        publish_all(backbone_settings.mqtt, [(EVENTS, b"marker %d" % number)])
        read_topic(number + 2)
    assert [r.value for r in read_topic(3)] == [b"completed", b"marker 0", b"marker 1"]


@pytest.mark.requirement("JE-33")
def test_the_removal_of_a_retained_end_is_no_event_whether_the_bridge_runs_or_not(
    backbone_settings, start_bridge, read_topic
):
    bridge = start_bridge()
    publish_all(backbone_settings.mqtt, [(EVENTS, b"completed")], retain=True)
    publish_all(backbone_settings.mqtt, [(EVENTS, b"")], retain=True)
    publish_all(backbone_settings.mqtt, [(EVENTS, b"marker 0")])
    read_topic(2)
    assert bridge.stop() == 0
    publish_all(backbone_settings.mqtt, [(EVENTS, b"completed again")], retain=True)
    publish_all(backbone_settings.mqtt, [(EVENTS, b"")], retain=True)
    publish_all(backbone_settings.mqtt, [(EVENTS, b""), (EVENTS, b"marker 1")])
    start_bridge()
    wanted = [b"completed", b"marker 0", b"completed again", b"", b"marker 1"]
    assert [r.value for r in read_topic(5)] == wanted


def test_an_acknowledgement_of_an_earlier_connection_is_never_sent_on_a_later_one(
    backbone_settings, read_topic, kafka_broker, proxy
):
    settings = with_mqtt(backbone_settings, port=proxy.port)
    tally = Tally()
    with Publisher(settings) as publisher:
        verdicts = Mock(ask=lambda _position, answer, _late: answer(None, None))
        earlier, later = (BridgeConnection(settings, publisher, tally, set(), verdicts) for _ in range(2))
        earlier.open()
        with kafka_broker.standing_still():
            publish_all(backbone_settings.mqtt, [(EVENTS, b"slow")])
            wait_until(lambda: tally.snapshot()["received"], what="the message at the bridge")
            proxy.cut()
            assert earlier.lost.wait(10)
            # The later connection gets no messages yet, so it has nothing to acknowledge.
            proxy.hold(DOWN, PUBLISH)
            opening = threading.Thread(target=later.open)
            opening.start()
            wait_until(lambda: proxy.count(DOWN, PUBLISH) == 2, what="redelivery, held")
        wait_until(lambda: tally.snapshot()["appended"], what="Kafka's answer to the earlier one")
        ends = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > ends or proxy.count(UP, PUBACK), what="time for a wrong ack")
        assert proxy.count(UP, PUBACK) == 0
        earlier.drop()
        proxy.release()
        opening.join(10)
        wait_until(lambda: proxy.count(UP, PUBACK) == 1, what="the acknowledgement of the redelivery")
        later.finish(5)
    assert [r.value for r in read_topic(2)] == [b"slow", b"slow"]


def test_no_more_than_the_window_is_taken_while_nothing_can_be_acknowledged(
    backbone_settings, start_bridge, kafka_broker, proxy
):
    settings = with_mqtt(backbone_settings, port=proxy.port, bridge_read_ahead=50)
    start_bridge(settings).stop()
    publish_all(backbone_settings.mqtt, [(EVENTS, b"%d" % n) for n in range(3000)])
    bridge = start_bridge(settings)
    # Without a receipt at the broker nothing is acknowledged, and Mosquitto must not fill our memory.
    proxy.hold(DOWN, PUBACK)
    wait_until(lambda: proxy.count(DOWN, PUBACK), what="a receipt held")
    bridge.stop()
    counts = json.loads(bridge.log().splitlines()[-1])
    assert counts["received"] - counts["acked"] <= 50


def test_acknowledgements_keep_the_order_of_the_messages():
    sent = []
    window = AckWindow(lambda mid, qos: sent.append(mid))
    entries = [window.add(mid, 1) for mid in range(1, 6)]
    assert [window.confirm(entries[n]) for n in (1, 2)] == [0, 0]
    assert window.confirm(entries[0]) == 3
    window.close()
    assert window.confirm(entries[3]) == 0
    assert sent == [1, 2, 3]
