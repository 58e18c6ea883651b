"""Accounts of agents at the local stack's own Mosquitto: what each may read and write, how they come and go."""

from __future__ import annotations

import stat
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from connectors.doors.mqtt_accounts.mosquitto_files import ACL, PASSWORDS, read_lines
from connectors.doors.mqtt_accounts.mqtt_accounts import MqttAccounts
from connectors.doors.mqtt_bridge.bridge_standby import has_session
from connectors.plumbing.mqtt_link.broker_settings import BRIDGE, OPERATOR, role_mqtt
from connectors.programs.local_stack import LocalStack
from schemas.keys.sealing import mqtt_agent_secret_purpose
from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.agents.agent_registry import AgentRequest
from schemas.streams.agents.mqtt_agents import AgentMqttRegistered, AgentMqttRemoved
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until
from tests.connectors.folded_jobs import KEYRING, FoldedJobs
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.mailbox_credentials import mailbox_credentials
from tests.mqtt_wire import listening, publish_all
from trunkline_agent.errors import Refused
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.mqtt.mqtt_client import LoginAnswer, try_login
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription
from trunkline_agent.wire.agent_message import mqtt_user, sign_said
from trunkline_agent.wire.mqtt_password import mqtt_password
from trunkline_agent.wire.signing import new_secret
from trunkline_agent.wire.strict_json import canonical

pytestmark = [pytest.mark.requirement("JE-26"), pytest.mark.stack]
EFFECTIVE_S = 20.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The stack's Mosquitto for the whole file."""
    with LocalStack(settings_in(tmp_path_factory.mktemp("guarded") / "a folder"), ("mosquitto",)) as found:
        yield found


@pytest.fixture
def settings(stack: LocalStack) -> Settings:
    return stack.settings


class Agents:
    """Agents of a log in memory, and the companion that keeps their accounts."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.log = settings, FoldedJobs()
        self.secrets: dict[str, str] = {}
        self.accounts = self.started()

    def started(self) -> MqttAccounts:
        """A companion on the log."""
        accounts = MqttAccounts(self.settings, KEYRING, self.log)
        self.log.listeners[:] = [accounts.on_change]
        accounts.open()
        return accounts

    def append(self, make: type[AgentRequest], name: str, **fields: Any) -> None:
        """Append a record of a request of its own."""
        body = make(agent_name=name, request_id=uuid.uuid4().hex, **fields)
        self.log._append(body.record(door="http", principal="operator"), 0)

    def add(self, name: str, secret: str) -> None:
        """Append the registration of an agent."""
        sealed = KEYRING.seal(secret.encode(), mqtt_agent_secret_purpose(name))
        self.append(AgentMqttRegistered, name, sealed_secret=sealed)

    def register(self, name: str) -> MqttSettings:
        """Register an agent, wait for its account; the broker's settings as it uses them."""
        self.secrets[name] = new_secret()
        self.add(name, self.secrets[name])
        assert self.accounts.wait_effective(mqtt_user(name), EFFECTIVE_S)
        return self.mqtt(name)

    def mqtt(self, name: str, secret: str | None = None) -> MqttSettings:
        """The broker's settings of an agent, below the agents' prefix."""
        user = mqtt_user(name)
        password = SecretStr(mqtt_password(secret or self.secrets[name], user))
        return below(self.settings.mqtt.model_copy(update={"username": user, "password": password}))

    def login(self, name: str, secret: str | None = None) -> LoginAnswer:
        """Return the answer of the broker to an agent's login."""
        user = mqtt_user(name)
        password = mqtt_password(secret or self.secrets[name], user)
        return try_login(self.settings.mqtt, user, password, timeout_s=10)


@pytest.fixture
def agents(settings: Settings) -> Iterator[Agents]:
    found = Agents(settings)
    yield found
    found.accounts.close()


def inbox_message(message_id: str) -> bytes:
    """A message as the bridge publishes it on an inbox."""
    fields = {"message_id": message_id, "from": "hub", "from_verified": True, "kind": "k", "body": "b"}
    return canonical(fields)


def below(mqtt: MqttSettings) -> MqttSettings:
    """Settings whose prefix is that of the agents, for the helpers of tests."""
    return mqtt.model_copy(update={"topic_prefix": mqtt.agents_prefix})


def test_an_agent_reads_only_its_own_inbox(settings: Settings, agents: Agents) -> None:
    ann, _ = agents.register("ann"), agents.register("ann-2")
    bridge, operator = below(role_mqtt(settings, BRIDGE)), role_mqtt(settings, OPERATOR)
    with (
        listening(ann, "#") as all_of_it,
        listening(ann, "ann-2/inbox") as others,
        listening(ann.model_copy(update={"topic_prefix": settings.mqtt.topic_prefix}), "#") as jobs,
    ):
        publish_all(operator, [("agent.ann/receipts", b"a job's"), ("0a1b2c3d/events", b"a job's")])
        publish_all(below(operator), [("ann/outbox", b"hers")])
        publish_all(bridge, [("ann-2/inbox", b"not hers"), ("ann/inbox", b"hers")])
        wait_until(lambda: all_of_it, what="her own")
    assert [(one.topic.rpartition("/")[2], one.payload) for one in all_of_it] == [("inbox", b"hers")]
    assert (others, jobs) == ([], [])


@pytest.mark.requirement("AG-28")
def test_a_wrong_secret_is_refused_within_the_patience_and_a_late_account_is_waited_for(
    settings: Settings, agents: Agents, tmp_path: Path
) -> None:
    agents.register("rosa")
    wrong = mailbox_credentials(settings, "rosa", "wrong-canary-secret")
    begun = time.monotonic()
    with pytest.raises(Refused, match=r"does not let user 'agent\.rosa' in") as caught:
        MqttAgent(wrong, tmp_path, print, patience_s=1.0).__enter__()
    assert time.monotonic() - begun < 5
    assert "canary" not in str(caught.value)
    assert caught.value.exit_code == 4
    late = mailbox_credentials(settings, "tardy", "the-secret-of-tardy")
    made = threading.Timer(0.5, agents.add, ("tardy", "the-secret-of-tardy"))
    made.start()
    with MqttAgent(late, tmp_path, print, patience_s=EFFECTIVE_S):
        pass
    made.join()


def test_an_agent_writes_only_its_own_outbox(settings: Settings, agents: Agents) -> None:
    ann, _ = agents.register("ann"), agents.register("bob")
    as_job = ann.model_copy(update={"topic_prefix": settings.mqtt.topic_prefix})
    operator = role_mqtt(settings, OPERATOR)
    with listening(below(operator), "#") as heard, listening(operator, "#") as of_jobs:
        for topic in ("bob/outbox", "bob/inbox", "ann/inbox", "ann/outbox/x", "ann"):
            publish_all(ann, [(topic, b"forged")])
        for topic in ("agent.ann/events", "0a1b2c3d/events", "bridge/x"):
            publish_all(as_job, [(topic, b"forged")])
        publish_all(ann, [("ann/outbox", b"her own")])
        wait_until(lambda: heard, what="her own word")
    assert [one.payload for one in heard] == [b"her own"]
    assert of_jobs == []


def test_the_bridge_reads_outboxes_and_writes_inboxes_and_not_the_other_way_round(settings: Settings) -> None:
    operator, bridge = below(role_mqtt(settings, OPERATOR)), below(role_mqtt(settings, BRIDGE))
    with listening(bridge, "#") as read, listening(operator, "#") as written:
        publish_all(bridge, [("x/outbox", b"forged")])
        publish_all(bridge, [("x/inbox", b"1")])
        publish_all(operator, [("x/inbox", b"2"), ("x/outbox", b"3")])
        wait_until(lambda: len(read) >= 1 and len(written) >= 3, what="the last")
    assert [one.payload for one in read] == [b"3"]
    assert [one.payload for one in written] == [b"1", b"2", b"3"]


def test_an_account_goes_with_its_registration_and_comes_back_with_another_secret(agents: Agents) -> None:
    agents.register("carl")
    first = agents.secrets["carl"]
    assert agents.login("carl") is LoginAnswer.LET_IN
    assert agents.login("carl", "another secret") is LoginAnswer.REFUSED
    agents.append(AgentMqttRemoved, "carl")
    wait_until(lambda: agents.login("carl") is LoginAnswer.REFUSED, 20, "its account has gone")
    agents.register("carl")
    assert agents.login("carl") is LoginAnswer.LET_IN
    assert agents.login("carl", first) is LoginAnswer.REFUSED


def test_a_restarted_companion_and_a_restarted_broker_keep_agents_as_they_were(
    settings: Settings, agents: Agents, stack: LocalStack
) -> None:
    dora = agents.register("dora")
    agents.register("emil")
    folder = agents.accounts._folder
    before = read_lines(folder / PASSWORDS)
    agents.accounts.close()
    agents.log.listeners.clear()
    agents.append(AgentMqttRemoved, "emil")
    stack["mosquitto"].stop()
    stack["mosquitto"].start()
    with listening(dora, "dora/inbox") as heard:
        publish_all(below(role_mqtt(settings, BRIDGE)), [("dora/inbox", b"hers")])
        wait_until(lambda: heard, what="what the ACL still lets her read")
    agents.accounts = agents.started()
    wait_until(lambda: "agent.emil" not in read_lines(folder / PASSWORDS), 20, "emil's account has gone")
    assert read_lines(folder / PASSWORDS)["agent.dora"] == before["agent.dora"]
    wait_until(lambda: "agent.emil" not in (folder / ACL).read_text(), 20, "and his rights")
    assert stat.S_IMODE((folder / ACL).stat().st_mode) == 0o600


def test_what_an_agent_says_changes_its_row_and_no_account(agents: Agents) -> None:
    agents.register("fred")
    word = {"message_id": "m", "to": "hub", "kind": "k", "body": "b", "seq": 1}
    value = canonical(sign_said(word, agents.secrets["fred"]))
    agents.log._append(OutgoingRecord("agent/fred", "id", "mqtt", "unverified", "agent.said", value), 0)
    assert mqtt_user("fred") in agents.accounts._effective


@pytest.mark.requirement("JE-30")
def test_another_account_that_connects_as_the_agent_destroys_no_session_of_it(
    settings: Settings, agents: Agents, tmp_path: Path
) -> None:
    agents.register("gina")
    mallory = agents.register("mallory")
    credentials, found = mailbox_credentials(settings, "gina", agents.secrets["gina"]), list[str]()

    def gina() -> MqttAgent:
        return MqttAgent(credentials, tmp_path / "gina", lambda message: found.append(message.message_id))

    with gina():
        pass
    bridge = below(role_mqtt(settings, BRIDGE))
    messages = [("gina/inbox", inbox_message(f"m-{number}")) for number in range(20)]
    publish_all(bridge, messages[:10])
    MqttConnection(mallory, client_id=mqtt_user("gina")).open()  # with a clean start
    publish_all(bridge, messages[10:])
    with gina():
        wait_until(lambda: len(found) >= 20, what="all messages")
    assert found == [f"m-{number}" for number in range(20)]


@pytest.mark.requirement("JE-30")
def test_messages_in_the_session_of_an_earlier_version_are_received_and_the_session_ends(
    settings: Settings, agents: Agents, tmp_path: Path
) -> None:
    hana = agents.register("hana")
    user, inbox = mqtt_user("hana"), f"{hana.topic_prefix}/hana/inbox"
    former = MqttConnection(hana, [Subscription(inbox)], client_id=user, session_expiry_s=600, manual_ack=True)
    former.open()
    former.close()
    messages = [("hana/inbox", inbox_message(f"m-{number}")) for number in range(20)]
    publish_all(below(role_mqtt(settings, BRIDGE)), messages)
    credentials, found = mailbox_credentials(settings, "hana", agents.secrets["hana"]), list[str]()
    with MqttAgent(credentials, tmp_path / "hana", lambda message: found.append(message.message_id)):
        wait_until(lambda: len(found) >= 20, what="all messages")
        names = {f"mqtt-former {user}"}
        wait_until(lambda: names.isdisjoint(one.name for one in threading.enumerate()), what="its end")
    assert not has_session(hana, user)
    assert found == [f"m-{number}" for number in range(20)]
