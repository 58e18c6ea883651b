"""A message over MQTT is claimed when the agent has confirmed it, whatever happens to the broker (DL-30)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import make_mosquitto, wait_until, with_mqtt
from tests.connectors.doors.mqtt_bridge.agents.mail_run import Agent, MailRun
from tests.mqtt_wire import listening
from trunkline_agent.mqtt.mqtt_connection import MqttConnection
from trunkline_agent.wire.agent_message import confirmation, mqtt_user
from trunkline_agent.wire.mqtt_password import mqtt_client_id
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("DL-30")


def fresh(name: str) -> str:
    """A name that nothing has yet."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


class OwnBroker:
    """A Mosquitto of its own, and the run whose bridge is connected to it."""

    def __init__(self, run: MailRun, folder: Path, more: str = "") -> None:
        self.run, self.shared, self.folder = run, run.settings, folder
        self.broker = make_mosquitto(folder, more)
        self.broker.start()
        run.bridge.stop()
        run.settings = with_mqtt(run.settings, port=self.broker.port, receipt_timeout_s=15, backoff_max_s=0.5)
        run.bridge = run.started(name=f"own-{fresh('bridge')}")
        run.bridge.wait_ready()

    def close(self) -> None:
        """Let the run use the shared broker again."""
        self.run.bridge.stop()
        self.broker.stop()
        self.run.settings = self.shared
        self.run.bridge = self.run.started()
        self.run.bridge.wait_ready()

    def wipe(self) -> None:
        """Kill the broker, and let another begin with an empty store."""
        self.broker.kill()
        for store in self.folder.glob("*.db*"):
            store.unlink()
        self.broker.start()


@pytest.fixture
def own(run: MailRun, tmp_path: Path) -> Iterator[OwnBroker]:
    """A broker that a test may kill."""
    found = OwnBroker(run, tmp_path / "mosquitto")
    try:
        yield found
    finally:
        found.close()


def with_session(run: MailRun, name: str) -> Agent:
    """An agent that is offline, and has a session at the broker."""
    agent = run.agent(fresh(name))
    with agent:
        first = run.post(agent.name, "first")
        agent.wait(1)
    run.wait_status(agent.name, [first])
    agent.got.clear()
    return agent


def post_many(run: MailRun, name: str, count: int) -> list[str]:
    """Post messages one after the other; their ids."""
    return [run.post(name, n) for n in range(count)]


def statuses(run: MailRun, name: str, ids: list[str]) -> set[str]:
    """The statuses of messages."""
    rows = run.mailbox(name)
    return {rows[one]["status"] for one in ids}


def kill(own: OwnBroker, agent: Agent) -> None:
    """Kill the broker soon after it has the messages."""
    time.sleep(0.5)
    own.broker.kill()
    own.broker.start()


def wipe(own: OwnBroker, agent: Agent) -> None:
    """The broker forgets everything."""
    time.sleep(0.5)
    own.wipe()


def clean_start(own: OwnBroker, agent: Agent) -> None:
    """A clean start with the agent's client id ends its session."""
    time.sleep(0.5)
    own_id = mqtt_client_id(agent.credentials.mqtt.secret, mqtt_user(agent.name))
    taking = MqttConnection(own.run.settings.mqtt, client_id=own_id)
    taking.open()
    taking.close()


@pytest.mark.parametrize("harm", [kill, wipe, clean_start])
def test_what_waits_for_an_agent_with_a_session_arrives_whatever_the_broker_loses(
    own: OwnBroker, harm: Callable[[OwnBroker, Agent], None]
) -> None:
    run, agent = own.run, with_session(own.run, "offline")
    sent = post_many(run, agent.name, 200)
    harm(own, agent)
    assert statuses(run, agent.name, sent) == {"unread"}, "nobody has them"
    with agent:
        agent.wait(200)
        run.wait_status(agent.name, sent)
    assert agent.ids() == sent


def test_what_a_full_queue_drops_comes_again(run: MailRun, tmp_path: Path) -> None:
    own = OwnBroker(run, tmp_path / "full", "max_queued_messages 5\n")
    try:
        agent = with_session(run, "crowded")
        sent = post_many(run, agent.name, 30)
        wait_until(lambda: "dropped" in own.broker.log_path.read_text(), 30, "the broker drops messages")
        with agent:
            agent.wait(30)
            run.wait_status(agent.name, sent)
        assert sorted(agent.ids()) == sorted(sent)
    finally:
        own.close()


@pytest.mark.requirement("DL-31")
def test_a_message_that_expires_in_the_session_is_never_handed_out_and_ends_as_expired(run: MailRun) -> None:
    agent = with_session(run, "late")
    body = {"recipient": agent.name, "type": "note", "payload": 1, "expires_in_s": 2}
    answer = run.operator.post("/api/hub/messages", json=body)
    over = str(answer.json()["message_id"])
    stays = run.post(agent.name, "stays")
    assert statuses(run, agent.name, [over, stays]) == {"unread"}
    run.wait_status(agent.name, [over], "expired")
    with agent:
        agent.wait(1)
        run.wait_status(agent.name, [stays])
    assert agent.ids() == [stays]
    assert run.mailbox(agent.name)[over]["handed_to"] is None


@pytest.mark.requirement("DL-31")
def test_a_message_that_expires_behind_a_slow_callback_is_not_handed_out(run: MailRun) -> None:
    agent = run.agent(fresh("slow"))
    agent.may_go_on.clear()
    with agent:
        slow = run.post(agent.name, "slow")
        # So long that the bridge publishes it more than a second before its end, also on a slow machine: a
        # copy's expiry interval is at least a second.
        body = {"recipient": agent.name, "type": "note", "payload": 1, "expires_in_s": 4}
        over = str(run.operator.post("/api/hub/messages", json=body).json()["message_id"])
        run.wait_status(agent.name, [over], "expired")
        agent.may_go_on.set()
        run.wait_status(agent.name, [slow])
        last = run.post(agent.name, "last")
        run.wait_status(agent.name, [last])
    assert agent.ids() == [slow, last]


@pytest.mark.requirement("DL-32")
def test_a_confirmation_that_is_forged_or_of_another_mailbox_changes_nothing_and_has_a_reason(
    run: MailRun,
) -> None:
    ann, bob = with_session(run, "ann"), with_session(run, "bob")
    sent, other = run.post(ann.name, "for ann"), run.post(bob.name, "for bob")
    mqtt = run.settings.mqtt.model_copy(update={"topic_prefix": run.settings.mqtt.agents_prefix})
    cases = [
        (confirmation([sent], "another secret"), "bad_signature"),
        ({"confirms": [sent]}, "bad_signature"),
        (confirmation([sent], str(bob.credentials.mqtt.secret)), "bad_signature"),
        (confirmation([other], ann.credentials.mqtt.secret), "unknown_stream"),
        (confirmation(["never-posted"], ann.credentials.mqtt.secret), "unknown_stream"),
        (confirmation(["../x"], ann.credentials.mqtt.secret), "malformed"),
    ]
    with listening(mqtt, f"{ann.name}/inbox") as inbox:
        run.say(ann.name, *(canonical(payload) for payload, _ in cases))

        def reasons() -> list[str]:
            payloads = [json.loads(message.payload) for message in inbox]
            return [payload["reason"] for payload in payloads if payload["kind"] == "receipt"]

        wait_until(lambda: len(reasons()) == len(cases), 30, "a receipt for each")
    assert sorted(reasons()) == sorted(reason for _, reason in cases)
    assert statuses(run, ann.name, [sent]) == statuses(run, bob.name, [other]) == {"unread"}
    run.say(ann.name, canonical(confirmation([sent, "never-posted"], ann.credentials.mqtt.secret)))
    run.wait_status(ann.name, [sent])


@pytest.mark.requirement("DL-33")
def test_a_client_that_never_confirms_gets_its_messages_again_and_is_named(run: MailRun) -> None:
    shared = run.settings
    run.bridge.stop()
    try:
        run.settings = with_mqtt(shared, inbox_confirm_s=0.3)
        run.bridge = run.started(name="impatient")
        run.bridge.wait_ready()
        agent = run.agent(fresh("silent"))
        mqtt = run.settings.mqtt.model_copy(update={"topic_prefix": run.settings.mqtt.agents_prefix})

        def repeats() -> int:
            agents = run.operator.get("/api/hub/mqtt-agents").json()["agents"]
            return next(int(row["unconfirmed"]) for row in agents if row["agent_name"] == agent.name)

        with listening(mqtt, f"{agent.name}/inbox") as inbox:
            sent = [run.post(agent.name, n) for n in range(2)]
            wait_until(lambda: len(inbox) >= 6, 30, "three times each")
            wait_until(lambda: repeats() >= 3, 30, "the gateway names it")
            seen = [json.loads(message.payload)["message_id"] for message in inbox]
        assert set(seen) == set(sent)
        assert statuses(run, agent.name, sent) == {"unread"}
        wait_until(lambda: f'"agent":"{agent.name}"' in run.bridge.log().replace(": ", ":"), what="its name")
        assert "inbox_unconfirmed" in run.bridge.log()
        with agent:
            agent.wait(2)
            run.wait_status(agent.name, sent)
        assert agent.ids() == sent
        wait_until(lambda: repeats() == 0, 30, "it confirms now")
        # Agents of other tests may be away with messages at the broker.
        assert "trunkline_mqtt_unconfirmed_agents " in run.operator.get("/metrics").text
    finally:
        run.bridge.stop()
        run.settings = shared
        run.bridge = run.started()
        run.bridge.wait_ready()


def test_an_agent_killed_in_its_callback_gets_the_message_again(run: MailRun) -> None:
    agent = run.agent(fresh("killed"))
    mqtt = run.settings.mqtt
    given = {
        "name": agent.name,
        "secret": agent.credentials.mqtt.secret,
        "prefix": mqtt.agents_prefix,
        "host": mqtt.host,
        "port": mqtt.port,
        "state": str(run.folder / "killed"),
    }
    sent = [run.post(agent.name, n) for n in range(3)]
    program = [sys.executable, "-m", "tests.connectors.doors.mqtt_bridge.agents.killed_agent"]
    ended = subprocess.run(
        program, input=json.dumps(given), text=True, timeout=60, cwd=PROJECT_ROOT, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    with agent:
        agent.wait(2)
        run.wait_status(agent.name, sent)
    assert agent.ids()[-2:] == sent[1:]
