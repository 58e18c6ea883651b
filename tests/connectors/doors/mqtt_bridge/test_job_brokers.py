"""Jobs with a broker of their own: one connection for each, found, opened, kept apart, and ended."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise

import pytest
from pydantic import SecretStr

from connectors.doors.mqtt_accounts.mosquitto_files import password_line
from connectors.log.publisher import Publisher
from connectors.plumbing.mqtt_link.broker_settings import resolve_mqtt, same_broker
from connectors.programs.local_stack import free_port
from schemas.keys.sealing import broker_password_purpose
from schemas.settings.settings import MqttSettings
from schemas.streams.job.job_registry import BrokerOverlay
from tests.broker_processes import LOOPBACK, make_mosquitto, wait_until, with_mqtt
from tests.connectors.doors.http_api.hub_access import JOBS, GatewayProcess, register
from tests.connectors.verdict_server import VerdictServer
from tests.mqtt_wire import publish_all
from tests.registered_jobs import register_job
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("JE-13")
PASSWORD = "canary-broker-7c1f"
USER = "bo"
# Jobs with brokers of their own come and go quickly here; a verdict may take its time.
QUICK = {"overlay_poll_s": 0.2, "overlay_linger_s": 0.5, "receipt_verdict_wait_s": 10}


@pytest.fixture
def other_broker(tmp_path):
    """A second Mosquitto, one that asks for a password."""
    passwords = tmp_path / "passwords"
    passwords.write_text(password_line(USER, PASSWORD) + "\n")
    passwords.chmod(0o600)
    more = f"allow_anonymous false\npassword_file {passwords}\n"
    broker = make_mosquitto(tmp_path / "other", more)
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def hub(backbone_settings):
    settings = with_mqtt(backbone_settings, **QUICK)
    found = VerdictServer(settings)
    yield found
    found.close()


def _overlay(keyring, port, **more):
    sealed = keyring.seal(PASSWORD.encode(), broker_password_purpose(LOOPBACK, port, USER))
    return BrokerOverlay(host=LOOPBACK, port=port, username=USER, sealed_password=sealed, **more)


def _json(overlay):
    return canonical(overlay.model_dump(mode="json")).decode()


def _at(settings, port):
    return with_mqtt(settings, port=port, username=USER, password=SecretStr(PASSWORD))


def _log_has(bridge, event, port):
    return any(
        line["event"] == event and line.get("broker") == f"{LOOPBACK}:{port}"
        for line in map(json.loads, bridge.log().splitlines())
    )


def _wait_for_verdicts(bridge):
    wait_until(lambda: "verdicts_open" in bridge.log(), what="the verdict stream")


@pytest.mark.requirement("CM-05")
def test_the_bridge_follows_a_live_jobs_own_broker_and_leaves_it_when_the_last_job_has_ended(
    hub, start_bridge, other_broker, keyring, tmp_path, read_topic
):
    bridge = start_bridge(hub.settings)
    _wait_for_verdicts(bridge)
    overlay = _overlay(keyring, other_broker.port)
    with Publisher(hub.settings) as publisher:
        job = register_job(publisher, keyring, "elsewhere", broker=overlay)
    hub.brokers = [_json(overlay)]
    wait_until(lambda: _log_has(bridge, "subscribed", other_broker.port), what="the second connection")
    there = Job(
        job.job_id, job.secret, mqtt=_at(hub.settings, other_broker.port).mqtt, state_dir=tmp_path / "state"
    )
    assert there.publish("started", "x").verdict == "accepted"
    assert there.publish("completed", "y").verdict == "accepted"
    hub.brokers = []
    wait_until(lambda: _log_has(bridge, "overlay_ended", other_broker.port), what="the end of the connection")
    # The broker of the settings has seen nothing of it, and works on.
    publish_all(hub.settings.mqtt, [("ffffffff/events", b"here")])
    assert [r.value for r in read_topic(4)].count(b"here") == 1
    hub.brokers = [_json(overlay)]
    wait_until(lambda: bridge.log().count("overlay_begins") == 2, what="the connection again")
    assert bridge.stop() == 0
    assert PASSWORD not in bridge.log()
    assert bridge.log().count('"overlay_ended"') == 2


def test_a_broker_that_is_down_or_cannot_be_opened_holds_up_nobody_else(
    hub, start_bridge, other_broker, keyring, read_topic
):
    down, wrong_key = free_port(), "k0:AAAA"
    hub.brokers = [
        _json(BrokerOverlay(host=LOOPBACK, port=down)),
        _json(BrokerOverlay(host=LOOPBACK, port=down, username="x", sealed_password=wrong_key)),
        _json(BrokerOverlay(host=LOOPBACK, port=down, tls=True, ca_certs="/no/such/file")),
        "not an overlay",
        '{"port": 0}',
        _json(_overlay(keyring, other_broker.port)),
    ]
    bridge = start_bridge(hub.settings)
    wait_until(lambda: _log_has(bridge, "subscribed", other_broker.port), what="the good one")
    wait_until(lambda: _log_has(bridge, "unreachable", down), what="attempts at the one that is down")
    wait_until(lambda: _log_has(bridge, "overlay_failed", down), what="the one without its certificates")
    publish_all(_at(hub.settings, other_broker.port).mqtt, [("0a1b2c3d/events", b"there")])
    publish_all(hub.settings.mqtt, [("0a1b2c3d/events", b"here")])
    assert sorted(r.value for r in read_topic(2)) == [b"here", b"there"]
    assert bridge.log().count("overlay_unusable") == 3  # each once, not at each look
    late = make_mosquitto(other_broker.log_path.parent.parent / "late")
    late.command[-1] = _conf_for_port(late, down)
    late.port = down
    late.start()
    try:
        wait_until(lambda: _log_has(bridge, "subscribed", down), what="the one that has come up")
        assert bridge.stop() == 0
    finally:
        late.kill()


def test_a_broker_that_cannot_be_used_is_begun_less_and_less_often(hub, start_bridge):
    nowhere = free_port()
    hub.brokers = [
        _json(BrokerOverlay(host=LOOPBACK, port=nowhere, tls=True, ca_certs="/no/such/file")),
        _json(BrokerOverlay(host="no..host", port=1)),
    ]
    bridge = start_bridge(hub.settings)

    def lines(event, broker):
        found = map(json.loads, bridge.log().splitlines())
        return [line for line in found if line["event"] == event and line.get("broker") == broker]

    wait_until(lambda: len(lines("overlay_begins", f"{LOOPBACK}:{nowhere}")) > 3, what="the fourth attempt")
    at = [datetime.fromisoformat(x["timestamp"]) for x in lines("overlay_begins", f"{LOOPBACK}:{nowhere}")]
    pauses_s = [(later - earlier).total_seconds() for earlier, later in pairwise(at)]
    assert all(pause > 0.2 * 2**n for n, pause in enumerate(pauses_s[:3], 1)), pauses_s
    # An invalid host name is like a broker that is down: its bridge goes on, with a back-off of its own.
    wait_until(lambda: lines("unreachable", "no..host:1"), what="the attempt")
    assert not lines("overlay_failed", "no..host:1")


def _conf_for_port(broker, port):
    """The broker's configuration with another port."""
    path = broker.log_path.with_name("moved.conf")
    text = broker.log_path.with_name("mosquitto.conf").read_text()
    path.write_text(text.replace(f"listener {broker.port} ", f"listener {port} "))
    return str(path)


def test_an_overlay_that_names_the_default_broker_needs_no_second_connection(
    hub, start_bridge, other_broker, keyring
):
    mqtt = hub.settings.mqtt
    hub.brokers = [
        _json(BrokerOverlay(host="localhost", port=mqtt.port)),
        _json(BrokerOverlay(username="somebody")),
        _json(_overlay(keyring, other_broker.port)),
    ]
    bridge = start_bridge(hub.settings)
    wait_until(lambda: _log_has(bridge, "subscribed", other_broker.port), what="the other broker")
    assert bridge.log().count("overlay_begins") == 1


def test_while_the_gateway_is_away_the_connections_stay(hub, start_bridge, other_broker, keyring, read_topic):
    settings = with_mqtt(hub.settings, overlay_linger_s=0)
    hub.brokers = [_json(_overlay(keyring, other_broker.port))]
    bridge = start_bridge(settings)
    wait_until(lambda: _log_has(bridge, "subscribed", other_broker.port), what="the second connection")
    hub.close()
    wait_until(lambda: "overlays_unknown" in bridge.log(), 30, "a look without an answer")
    again = VerdictServer(settings, hub.port, hub.brokers)
    again.wait_follower()
    publish_all(_at(hub.settings, other_broker.port).mqtt, [("0a1b2c3d/events", b"there")])
    assert [r.value for r in read_topic(1)] == [b"there"]
    again.close()
    assert bridge.stop() == 0
    assert bridge.log().count("overlay_begins") == 1


@pytest.mark.requirement("JE-17")
def test_with_the_real_gateway_a_job_runs_at_its_own_broker(
    backbone_settings, start_bridge, other_broker, tmp_path
):
    settings = with_mqtt(backbone_settings, **QUICK)
    gateway = GatewayProcess(settings, tmp_path)
    try:
        gateway.wait_ready(60)
        bridge = start_bridge(gateway.settings)
        _wait_for_verdicts(bridge)
        asked = {"host": LOOPBACK, "port": other_broker.port, "username": USER, "password": PASSWORD}
        with gateway.client() as operator:
            found = register(operator, broker=asked)
            granted = operator.post(f"{JOBS}/pick", json={"session": "s"}).json()["broker"]
        password = granted.pop("password")
        mqtt = resolve_mqtt(settings.mqtt, BrokerOverlay(**granted), password)
        there = Job(found["job_id"], found["secret"], mqtt=mqtt, state_dir=tmp_path / "s")
        # At once: the broker says that nobody listens yet, and the publisher sends the same again.
        assert there.publish("started", "x").verdict == "accepted"
        assert there.publish("completed", "y").verdict == "accepted"
        wait_until(lambda: _log_has(bridge, "overlay_ended", other_broker.port), what="the connection's end")
    finally:
        gateway.program.stop()


def test_each_field_that_an_overlay_names_wins_over_the_environments():
    mqtt = MqttSettings(host="a", port=1, username="u", password=SecretStr("p"), tls=True, ca_certs="/ca")
    assert resolve_mqtt(mqtt, None) is mqtt
    assert resolve_mqtt(mqtt, BrokerOverlay()) == mqtt
    found = resolve_mqtt(mqtt, BrokerOverlay(host="b", tls=False), None)
    # User and password belong to their broker: nobody may have them sent to a host of his own.
    assert (found.host, found.port, found.tls, found.username, found.password) == ("b", 1, False, None, None)
    stranger = resolve_mqtt(mqtt, BrokerOverlay(host="b", username=mqtt.username))
    assert (stranger.username, stranger.password) == (mqtt.username, None)
    assert resolve_mqtt(mqtt, BrokerOverlay(ca_certs="/ca")).password.get_secret_value() == "p"
    # Nor in clear to our own, where we use TLS.
    assert resolve_mqtt(mqtt, BrokerOverlay(tls=False)).password is None
    assert str(resolve_mqtt(mqtt, BrokerOverlay(certfile="/c", keyfile="/k")).keyfile) == "/k"
    mine = resolve_mqtt(mqtt, BrokerOverlay(username="v"), "q")
    assert (mine.username, mine.password.get_secret_value()) == ("v", "q")
    # A password belongs to its user.
    assert resolve_mqtt(mqtt, BrokerOverlay(username="v")).password is None
    assert same_broker(MqttSettings(host="B", port=1), MqttSettings(host="b", port=1, username="x"))
    assert same_broker(MqttSettings(host="localhost"), MqttSettings(host="127.0.0.1"))
    assert not same_broker(MqttSettings(host="b", port=1), MqttSettings(host="b", port=2))
