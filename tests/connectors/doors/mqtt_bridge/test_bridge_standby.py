"""One active bridge per broker: who takes over when, with real processes, and that nothing is lost by it."""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest

from connectors.doors.mqtt_bridge.bridge_standby import StandbyWatch
from connectors.log.kafka_libraries import to_record
from connectors.log.publisher import Publisher
from connectors.plumbing.mqtt_link.payloads import Presence, encode_presence, presence_topic
from tests.broker_processes import ProgramProcess, make_mosquitto, wait_until, with_mqtt
from tests.connectors.folded_log import FoldedLog
from tests.mqtt_wire import listening, publish_all
from tests.registered_jobs import register_job
from tests.schemas.job_records import signed
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("JE-19")
TAKEN_OVER_IN_S = 10.0


class _Bridge(ProgramProcess):
    """A bridge with a log of its own."""

    def role(self):
        """Return its role by its log: active, standby or neither."""
        roles = {"subscribed": "active", "standby": "standby", "connection_lost": "", "stopped": ""}
        said = [json.loads(line)["event"] for line in self.log().splitlines()]
        return next((roles[event] for event in reversed(said) if event in roles), "")


@pytest.fixture
def start_named(tmp_path):
    started = []

    def start(settings, name):
        bridge = _Bridge("connectors.doors.mqtt_bridge", settings, tmp_path, name)
        started.append(bridge)
        return bridge

    yield start
    for bridge in started:
        bridge.kill()


@pytest.fixture
def job(backbone_settings, keyring):
    with Publisher(backbone_settings) as publisher:
        return register_job(publisher, keyring, "count the stars")


def _pair(start_named, settings):
    first = start_named(settings, "first")
    first.wait_ready()
    wait_until(lambda: first.role() == "active", what="an active bridge")
    second = start_named(settings, "second")
    second.wait_ready()
    wait_until(lambda: second.role() == "standby", what="one that stands by")
    return first, second


def _event(job, seq):
    kind = "started" if seq == 1 else "progress"
    return f"{job.job_id}/events", canonical(signed(seq, kind, job.secret, job_id=job.job_id))


class _Load:
    """Publishes a job's events, a few at a time, on a thread, until told to end."""

    def __init__(self, mqtt, job):
        self.count = 0
        self.mqtt, self.job = mqtt, job
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._end.wait(0.05):
            publish_all(self.mqtt, [_event(self.job, self.count + n) for n in range(1, 21)])
            self.count += 20

    def end(self):
        self._end.set()
        self._thread.join(60)
        return self.count


def _assert_each_accepted_once_in_order(load, read_topic, keyring):
    """End the load and fold the log: every seq is accepted exactly once, in the order it was published."""
    count = load.end()
    publish_all(load.mqtt, [("ffffffff/events", b"last")])
    wait_until(lambda: any(r.value == b"last" for r in read_topic(count + 2)), what="the last message")
    log = FoldedLog(keyring)
    accepted = []
    for record in sorted(read_topic(count + 2), key=lambda r: (r.partition, r.offset)):
        found = log.add(to_record(record))
        if dict(record.headers)["ce_type"] == b"job.event" and record.key == f"job/{load.job.job_id}".encode():
            assert found.verdict in ("accepted", "duplicate"), found
            assert not found.late
            if found.verdict == "accepted":
                accepted.append(json.loads(record.value)["seq"])
    assert accepted == list(range(1, count + 1))


@pytest.mark.requirement("JE-18")
@pytest.mark.requirement("CM-03")
def test_after_kill_9_of_the_active_bridge_the_other_is_active_within_10_s_and_nothing_is_lost(
    backbone_settings, start_named, read_topic, job, keyring
):
    first, second = _pair(start_named, backbone_settings)
    load = _Load(backbone_settings.mqtt, job)
    wait_until(lambda: load.count >= 100, what="some load")
    first.process.kill()
    wait_until(lambda: second.role() == "active", TAKEN_OVER_IN_S, "the other one is active")
    seen = load.count
    wait_until(lambda: load.count > seen, what="more load")
    _assert_each_accepted_once_in_order(load, read_topic, keyring)


@pytest.mark.requirement("CM-03")
def test_a_bridge_that_hangs_is_replaced_and_stands_by_when_it_wakes_up(
    backbone_settings, start_named, read_topic, job, keyring
):
    first, second = _pair(start_named, backbone_settings)
    load = _Load(backbone_settings.mqtt, job)
    wait_until(lambda: load.count >= 100, what="some load")
    first.process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        wait_until(lambda: second.role() == "active", TAKEN_OVER_IN_S, "the other one is active")
        print("taken over after", round(time.monotonic() - stopped, 2), "s")
    finally:
        first.process.send_signal(signal.SIGCONT)
    wait_until(lambda: first.role() == "standby", 30, "the first one stands by")
    _assert_each_accepted_once_in_order(load, read_topic, keyring)
    assert (first.role(), second.role()) == ("standby", "active")
    assert second.log().count('"subscribed"') == 1


def test_a_graceful_stop_hands_over_at_once(backbone_settings, start_named, read_topic):
    # A silence that is long: only what the first one says at its end can be the reason.
    settings = with_mqtt(backbone_settings, bridge_keepalive_s=30)
    first, second = _pair(start_named, settings)
    assert first.stop() == 0
    wait_until(lambda: second.role() == "active", 10, "the other one is active")
    assert "the active one is gone" in second.log()
    messages = [("0a1b2c3d/events", b"%d" % n) for n in range(50)]
    publish_all(settings.mqtt, messages)
    assert [r.value for r in read_topic(50)] == [payload for _, payload in messages]


def test_of_bridges_that_start_at_once_one_becomes_active(backbone_settings, start_named, read_topic):
    bridges = [start_named(backbone_settings, name) for name in ("first", "second", "third")]
    roles = ["active", "standby", "standby"]
    wait_until(lambda: sorted(b.role() for b in bridges) == roles, 30, "one active, two that stand by")
    messages = [("0a1b2c3d/events", b"%d" % n) for n in range(50)]
    publish_all(backbone_settings.mqtt, messages)
    assert list(dict.fromkeys(r.value for r in read_topic(50))) == [payload for _, payload in messages]
    assert sorted(b.role() for b in bridges) == roles


def test_after_a_restart_of_the_broker_that_forgets_all_exactly_one_is_active(
    backbone_settings, start_named, tmp_path
):
    broker = make_mosquitto(tmp_path / "own")
    broker.start()
    try:
        settings = with_mqtt(backbone_settings, port=broker.port)
        bridges = _pair(start_named, settings)
        before = sum(b.log().count('"subscribed"') for b in bridges)
        broker.kill()  # presence and sessions were not saved
        broker.start()

        def settled():
            again = sum(b.log().count('"subscribed"') for b in bridges) > before
            return again and sorted(b.role() for b in bridges) == ["active", "standby"]

        wait_until(settled, 30, "one active, one that stands by")
    finally:
        broker.kill()


def _watch(settings, bridge="me", cut_off=False):
    watch = StandbyWatch(settings.mqtt, bridge, cut_off=cut_off)
    watch.open()
    return watch


def _say(settings, bridge, active, retain=True):
    topic = presence_topic(settings.mqtt).removeprefix(settings.mqtt.topic_prefix + "/")
    publish_all(settings.mqtt, [(topic, encode_presence(Presence(bridge, active)))], retain=retain)


def _turn(watch, timeout_s):
    """Why it is our turn, None when it is not within the time; and who was said to be active."""
    stop, active = threading.Event(), []
    timer = threading.Timer(timeout_s, stop.set)
    timer.start()
    try:
        return watch.wait_turn(stop, active.append), active
    finally:
        timer.cancel()
        timer.join()
        watch.close()


def test_a_presence_that_outlived_its_bridge_is_believed_for_one_and_a_half_keepalives(backbone_settings):
    settings = with_mqtt(backbone_settings, bridge_keepalive_s=1)
    _say(settings, "dead", True)
    assert _turn(_watch(settings), 10) == ("the active one is silent", ["dead"])


def test_our_own_presence_is_no_reason_to_wait_unless_another_has_just_taken_over(backbone_settings):
    _say(backbone_settings, "me", True)
    assert _turn(_watch(backbone_settings), 10) == ("it was this one", [])
    assert _turn(_watch(backbone_settings, cut_off=True), 1)[0] is None


def test_a_bridge_that_was_thrown_off_does_not_fight_back_while_the_other_shows_itself(backbone_settings):
    watch = _watch(backbone_settings, cut_off=True)
    _say(backbone_settings, "other", True)
    assert _turn(watch, 4) == (None, ["other"])


def test_the_late_last_will_of_a_replaced_bridge_and_a_removed_presence_change_nothing(backbone_settings):
    topic = presence_topic(backbone_settings.mqtt).removeprefix(backbone_settings.mqtt.topic_prefix + "/")
    watch = _watch(backbone_settings)
    _say(backbone_settings, "active", True)
    _say(backbone_settings, "replaced", False)
    publish_all(backbone_settings.mqtt, [(topic, b"")], retain=True)
    publish_all(backbone_settings.mqtt, [(topic, b"\xff no presence")])
    assert _turn(watch, 1.5) == (None, ["active"])
    watch = _watch(backbone_settings)
    _say(backbone_settings, "active", True)
    _say(backbone_settings, "active", False)
    assert _turn(watch, 10)[0] == "the active one is gone"


def test_the_active_bridge_shows_itself_and_its_last_will_says_that_it_is_gone(backbone_settings, start_named):
    settings = with_mqtt(backbone_settings, bridge_keepalive_s=1)
    with listening(settings.mqtt, "bridge/+") as shown:
        bridge = start_named(settings, "first")
        wait_until(lambda: len(shown) >= 4, what="presences")
        assert {json.loads(message.payload)["active"] for message in shown} == {True}
        assert len({json.loads(message.payload)["bridge"] for message in shown}) == 1
        bridge.process.kill()
        wait_until(lambda: not json.loads(shown[-1].payload)["active"], 20, "the last will")
