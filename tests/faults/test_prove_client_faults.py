"""Faults of `./trunkline prove` by clients and full brokers: each is made, loses nothing, and finds bugs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from connectors.doors.mqtt_bridge.bridge_standby import session_ids
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import Settings
from tests.broker_processes import BrokerProcess, accepts, wait_until, with_mqtt
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.mqtt_bridge.agents.mail_run import MailRun
from tests.faults.prove import client_faults
from tests.faults.prove.brokers import Brokers
from tests.faults.prove.client_faults import ClientFault, ClientFaults
from tests.faults.prove.comparison import LOST, Reader, unreached
from tests.faults.prove.delivery_doors import HubMailbox
from tests.faults.prove.delivery_notes import Deliveries
from tests.faults.prove.evidence import answered
from tests.faults.prove.hub_client import Clock, HubClient
from tests.faults.prove.load_messages import DORA, FOLA, READERS, UTE, mailbox
from tests.faults.prove.oracle import ACKED, HANDED, Oracle
from tests.faults.prove.schedule import BAD_OUTPUT, CLIENT_FAULTS, LARGEST, SLOW_READ, TAKE_ID
from tests.mqtt_wire import publish_all
from tests.own_settings import own_settings
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription
from trunkline_agent.wire.agent_message import mqtt_user
from trunkline_agent.wire.mqtt_password import mqtt_client_id

pytestmark = [pytest.mark.kafka, pytest.mark.mosquitto, pytest.mark.requirement("ST-64")]

LASTS_S = 1.0
PATIENCE_S = 60.0


class FaultRun:
    """The faults at a real gateway and a real bridge."""

    def __init__(self, run: MailRun, folder: Path) -> None:
        self.run, self.oracle = run, Oracle(folder / "oracle.jsonl")
        clock, log = Clock(), Deliveries(folder / "deliveries.jsonl")
        clock.begin(PATIENCE_S, 0.0)
        self.agent = run.agent(f"mina-{uuid.uuid4().hex[:6]}")
        secret = str(self.agent.credentials.mqtt_access().secret)
        self.tokens = {name: add_principal(run.operator, name, "worker") for name in (FOLA, UTE, "moe")}
        for name in (*READERS, DORA):
            add_principal(run.operator, name, "worker")
        urls = [run.settings.gateway_url]
        self.clients = [
            HubClient(urls, token, clock, 1) for token in (self.tokens["moe"], run.gateway.operator_token)
        ]
        self.made = ClientFaults(
            run.settings,
            urls,
            [mqtt_client_id(secret, mqtt_user(self.agent.name))],
            self.tokens,
            lambda: HubMailbox(self.clients[0], "moe", log),
            self.clients[1],
            self.oracle,
            clock,
        )

    def lost(self) -> list[str]:
        """The kinds of what UTE did not get."""
        box = mailbox(UTE)
        shown = answered("gateway", self.run.settings.gateway_url, self.run.settings, {box})
        return [one.kind for one in unreached([Reader(box)], self.oracle.notes(HANDED), shown, {})]


@pytest.fixture(scope="module")
def faults(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultRun]:
    """Gateway, bridge, an agent and the principals."""
    folder = tmp_path_factory.mktemp("faults")
    settings: Settings = own_settings(kafka_broker, mosquitto_broker, folder)
    run = MailRun(with_mqtt(settings, receipt_timeout_s=4), load_keyring(settings), folder)
    found = FaultRun(run, folder)
    try:
        yield found
    finally:
        for client in found.clients:
            client.close()
        run.close()


def test_each_fault_of_clients_is_made_by_its_name(faults: FaultRun) -> None:
    assert set(faults.made.by_name()) == set(CLIENT_FAULTS)


def test_an_agent_whose_client_id_is_taken_gets_what_was_sent_meanwhile(faults: FaultRun) -> None:
    fault: ClientFault = faults.made.by_name()[f"{TAKE_ID}:agent"]
    with faults.agent:
        sent = [faults.run.post(faults.agent.name, n) for n in range(20)]
        fault(LASTS_S)
        faults.run.wait_status(faults.agent.name, sent)
    assert set(faults.agent.ids()) == set(sent)


def test_a_bridge_whose_session_ends_goes_on_and_a_session_with_a_known_id_is_found(faults: FaultRun) -> None:
    fault, mqtt = faults.made.by_name()[f"{TAKE_ID}:bridge"], faults.run.settings.mqtt
    fault(LASTS_S)
    with faults.agent as client:
        # The broker had no subscriber while the bridge connected again.
        with suppress(BackboneUnreachable):
            client.send(UTE, "note", "still there", message_id="after-the-taking")
        client.resend()
        faults.run.wait_status(UTE, ["after-the-taking"], "unread")
    known = MqttConnection(mqtt, client_id=mqtt.bridge_client_id, session_expiry_s=60)
    known.open()
    known.close()
    assert mqtt.bridge_client_id not in session_ids(faults.run.settings)[:1]
    with pytest.raises(AssertionError, match="others can guess"):
        fault(LASTS_S)


def test_largest_bodies_arrive_and_slow_readers_delay_nobody(faults: FaultRun) -> None:
    by_name = faults.made.by_name()
    by_name[f"{LARGEST}:messages"](0.0)
    by_name[f"{SLOW_READ}:events"](LASTS_S)
    boxes = {note.stream for note in faults.oracle.notes(ACKED)}
    shown = answered("gateway", faults.run.settings.gateway_url, faults.run.settings, boxes)
    limit = faults.run.settings.limits.payload_bytes
    for note in faults.oracle.notes(ACKED):
        mail = shown.mail[note.stream, note.id]
        assert mail.hash == note.hash
        assert len(mail.body) > limit - 2 * 1024 or note.stream == mailbox(UTE)


def test_a_message_that_could_not_be_printed_waits_and_one_that_was_taken_before_is_found(
    faults: FaultRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = faults.made.by_name()[f"{BAD_OUTPUT}:drain"]
    fault(0.0)
    assert faults.oracle.notes(HANDED)
    assert faults.lost() == []
    # With an id of its own, the command takes messages before it prints them.
    at_once = [*client_faults._DRAIN, "--request-id", uuid.uuid4().hex]
    monkeypatch.setattr(client_faults, "_DRAIN", at_once)
    fault(0.0)
    assert faults.lost() == [LOST]


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    """Brokers of which a test starts Mosquitto."""
    found = Brokers(tmp_path / "brokers")
    found.processes["mosquitto"].start()
    try:
        yield found
    finally:
        found.__exit__()


def test_a_mosquitto_with_full_queues_drops_what_waits_for_a_client_until_it_has_room(
    brokers: Brokers, backbone_settings: Settings
) -> None:
    mosquitto = brokers.processes["mosquitto"]
    mqtt = backbone_settings.mqtt.model_copy(update={"port": mosquitto.port})
    got: list[bytes] = []

    def reader() -> MqttConnection:
        wanted, take = [Subscription(f"{mqtt.topic_prefix}/+/events")], lambda one: got.append(one.payload)
        found = MqttConnection(mqtt, wanted, client_id="reader", session_expiry_s=60, on_message=take)
        found.open()
        return found

    reader().close()
    brokers.limit_queues(is_full=True)
    wait_until(lambda: accepts(mosquitto.port), what="it is back")
    publish_all(mqtt, [("0a1b2c3d/events", b"%d" % number) for number in range(5)])
    wait_until(lambda: brokers.dropped == 1, what="it drops messages")
    brokers.limit_queues(is_full=False)
    wait_until(lambda: accepts(mosquitto.port), what="it is back")
    publish_all(mqtt, [("0a1b2c3d/events", b"%d" % number) for number in range(5, 10)])
    again = reader()
    wait_until(lambda: b"9" in got, what="the last one")
    again.close()
    assert got[0] == b"0" and got[-5:] == [b"5", b"6", b"7", b"8", b"9"] and len(got) < 10


@pytest.mark.parametrize("is_full", [False, True])
def test_a_mosquitto_with_a_full_disk_goes_on_and_loses_what_it_could_not_save(
    brokers: Brokers, backbone_settings: Settings, is_full: bool
) -> None:
    mosquitto = brokers.processes["mosquitto"]
    mqtt = backbone_settings.mqtt.model_copy(update={"port": mosquitto.port})
    kept = MqttConnection(mqtt, client_id="reader", session_expiry_s=60)
    kept.open()
    kept.close()
    if is_full:
        brokers.fill_disk("mosquitto")
    else:
        brokers.save_mosquitto()
    assert client_faults.has_own_session(mqtt, "reader") is True
    brokers.kill("mosquitto")
    wait_until(lambda: accepts(mosquitto.port), what="it is back")
    assert client_faults.has_own_session(mqtt, "reader") is not is_full
