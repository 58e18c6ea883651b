"""Mailboxes over MQTT when something is killed or away: nothing is lost, and what comes twice has one id."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

import pytest

from connectors.tools.conformance.mqtt_proxy import DOWN, PUBLISH, MqttProxy
from tests.broker_processes import LOOPBACK, BrokerProcess, make_mosquitto, wait_until, with_mqtt
from tests.connectors.doors.mqtt_bridge.agents.mail_run import MailRun
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.wire.agent_message import sign_said
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("JE-26")


def fresh(name: str) -> str:
    """A name that nothing has yet."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.mark.requirement("DL-30")
def test_a_bridge_killed_between_the_brokers_answer_and_the_claim_loses_and_doubles_nothing(
    run: MailRun,
) -> None:
    agent = run.agent(fresh("twice"))
    with agent:
        run.bridge.stop()
        sent = [run.post(agent.name, n) for n in range(3)]
        killed = run.started("tests.connectors.doors.mqtt_bridge.agents.killed_bridge")
        assert killed.process.wait(30) == -signal.SIGKILL
        agent.wait(3)
        assert {row["status"] for row in run.mailbox(agent.name).values()} == {"unread"}
        run.bridge = run.started()
        run.bridge.wait_ready()
        run.wait_status(agent.name, sent)
    assert agent.ids() == sent


def test_a_killed_bridge_loses_nothing_in_either_direction(run: MailRun) -> None:
    ann, bob = run.agent(fresh("ann")), run.agent(fresh("bob"))
    with ann as speaks, bob:
        speaks.send(bob.name, "count", 0)
        bob.wait(1)
        run.bridge.kill()
        waiting = [run.post(bob.name, n) for n in range(5)]
        said = canonical(
            sign_said(
                {"message_id": "while-away", "to": bob.name, "kind": "k", "body": "b", "seq": 2},
                ann.credentials.mqtt.secret,
            )
        )
        run.say(ann.name, said)
        run.bridge = run.started()
        run.bridge.wait_ready()
        wait_until(lambda: {*waiting, "while-away"} <= set(bob.ids()), 30, "all of it")
        run.wait_status(bob.name, [*waiting, "while-away"])
    assert [one for one in bob.ids() if one in waiting] == waiting


def test_the_bridge_that_stands_by_delivers_nothing_until_it_takes_over(run: MailRun) -> None:
    agent = run.agent(fresh("watched"))
    with agent:
        # The active one is at work.
        before = [run.post(agent.name, "first of all")]
        agent.wait(1)
        run.wait_status(agent.name, before)
    second = run.started(name="second")
    try:
        second.wait_ready()
        wait_until(lambda: "inboxes_follow" in second.log(), what="it hears the news")
        with agent:
            first = [run.post(agent.name, n) for n in range(40)]
            agent.wait(41)
            run.wait_status(agent.name, first)
            assert agent.ids() == before + first, "each once"
            run.bridge.kill()
            after = [run.post(agent.name, n) for n in range(10)]
            agent.wait(51)
            run.wait_status(agent.name, after)
        assert agent.ids() == before + first + after
    finally:
        run.bridge = second


def test_while_kafka_is_away_nothing_is_confirmed_and_the_same_bytes_count_once_later(
    run: MailRun, kafka_broker: BrokerProcess
) -> None:
    agent, reader = run.agent(fresh("patient")), fresh("reader")
    run.principal(reader).close()
    with agent as client:
        client.send(reader, "note", 1)
        hasty = with_mqtt(run.settings, receipt_timeout_s=1)
        with kafka_broker.standing_still():
            client._mqtt = hasty.mqtt
            with pytest.raises(BackboneUnreachable, match="no receipt"):
                client.send(reader, "note", 2, message_id="kept")
        client._mqtt = run.settings.mqtt.model_copy(
            update={"username": client._mqtt.username, "receipt_timeout_s": 30}
        )
        assert client.resend() in (0, 1)
        client.send(reader, "note", 3)
    wait_until(lambda: len(run.mailbox(reader)) == 3, 30, "all three")
    assert [row["body"] for row in run.mailbox(reader).values()] == ["1", "2", "3"]


def test_an_agent_killed_before_it_acknowledged_gets_the_message_again(
    run: MailRun, mosquitto_broker: BrokerProcess
) -> None:
    agent = run.agent(fresh("hit"))
    proxy = MqttProxy(LOOPBACK, mosquitto_broker.port)
    try:
        through = with_mqtt(run.settings, port=proxy.port)
        with MqttAgent(agent.credentials, run.folder / "agents", agent._receive, broker=through.mqtt):
            proxy.hold(DOWN, PUBLISH)
            sent = run.post(agent.name, "hello")
            wait_until(lambda: proxy.count(DOWN, PUBLISH), 30, "it is on the way")
            proxy.cut()
        assert agent.got == []
        assert run.mailbox(agent.name)[sent]["status"] == "unread"
        with agent:
            agent.wait(1)
            run.wait_status(agent.name, [sent])
        assert agent.ids() == [sent]
    finally:
        proxy.close()


def test_an_agent_whose_broker_is_down_for_a_while_sends_and_receives_when_it_is_back(
    run: MailRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent, reader, shared = run.agent(fresh("steady")), fresh("reader"), run.settings
    run.principal(reader).close()
    run.bridge.stop()
    broker = make_mosquitto(tmp_path)
    broker.start()
    try:
        run.settings = with_mqtt(shared, port=broker.port, receipt_timeout_s=15)
        run.bridge = run.started(name="elsewhere")
        run.bridge.wait_ready()
        with agent as client:
            client.send(reader, "note", 1)
            broker.stop()
            wait_until(lambda: "tries again" in caplog.text, what="a refused try")
            broker.start()
            client.send(reader, "note", 2)
            sent = [run.post(agent.name, n) for n in range(3)]
            agent.wait(3)
            run.wait_status(agent.name, sent)
        assert agent.ids() == sent
        assert [row["body"] for row in run.mailbox(reader).values()] == ["1", "2"]
    finally:
        run.bridge.stop()
        broker.stop()
        run.settings = shared
        run.bridge = run.started()
        run.bridge.wait_ready()
