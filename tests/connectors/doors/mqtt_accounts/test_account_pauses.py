"""Accounts that may publish nothing for a while, at the stack's own Mosquitto (LM-10)."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from connectors.doors.mqtt_accounts.mosquitto_files import ACL, AccountPauses
from connectors.doors.mqtt_accounts.mqtt_accounts import MqttAccounts
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from connectors.programs.local_stack import LocalStack
from schemas.keys.sealing import mqtt_agent_secret_purpose
from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.agents.mqtt_agents import AgentMqttRegistered
from tests.broker_processes import wait_until, with_mqtt
from tests.connectors.folded_jobs import KEYRING, FoldedJobs
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.mailbox_credentials import mailbox_credentials
from trunkline_agent.broker import job_broker
from trunkline_agent.errors import BackboneUnreachable, Refused
from trunkline_agent.jobs.job import Job
from trunkline_agent.mqtt import event_delivery
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.mqtt.mqtt_client import NOT_AUTHORIZED
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription
from trunkline_agent.wire.agent_message import mqtt_user
from trunkline_agent.wire.mqtt_password import mqtt_password
from trunkline_agent.wire.signing import new_secret

pytestmark = pytest.mark.requirement("LM-10")
EFFECTIVE_S = 20.0
PAUSE_S = 60.0


class Client:
    """A connected client: what it published last, and what it has received."""

    def __init__(self, mqtt: MqttSettings, reads: str, writes: str) -> None:
        self.reads, self._writes = reads, writes
        self.received: list[bytes] = []
        self._connection = MqttConnection(
            mqtt,
            [Subscription(reads)],
            client_id=uuid.uuid4().hex,
            session_expiry_s=60,
            on_message=lambda message: self.received.append(message.payload),
        )
        self._connection.open()

    def may_publish(self) -> bool:
        """Publish; True if the broker takes the message. The connection stays in either case."""
        reason = self._connection.publish_and_wait(self._writes, b"x")
        assert reason.value == NOT_AUTHORIZED or not reason.is_failure
        return not reason.is_failure

    def flood(self, messages: int) -> set[int]:
        """Publish without waiting; the reason codes."""
        sent = [self._connection.publish(self._writes, b"x" * 100) for _ in range(messages)]
        return {one.result(30).value for one in sent}

    def close(self) -> None:
        """End the connection."""
        assert not self._connection.lost.is_set()
        self._connection.close()


class Accounts:
    """Jobs and agents of a log in memory, with their accounts at the broker."""

    def __init__(self, settings: Settings, ends: ExitStack) -> None:
        self.settings, self._ends, self.log = settings, ends, FoldedJobs()
        self.service = MqttAccounts(settings, KEYRING, self.log)
        self.log.listeners.append(self.service.on_change)
        self.service.open()
        ends.callback(self.service.close)

    def agent(self, name: str) -> str:
        """Register an agent; its secret."""
        secret = new_secret()
        by = {"door": "http", "principal": "operator"}
        self.log._append(
            AgentMqttRegistered(
                sealed_secret=KEYRING.seal(secret.encode(), mqtt_agent_secret_purpose(name)),
                agent_name=name,
                request_id=uuid.uuid4().hex,
            ).record(**by),
            0,
        )
        assert self.service.wait_effective(mqtt_user(name), EFFECTIVE_S)
        return secret

    def agent_client(self, name: str) -> Client:
        """A client of a new agent."""
        user, prefix = mqtt_user(name), self.settings.mqtt.agents_prefix
        login = {"username": user, "password": SecretStr(mqtt_password(self.agent(name), user))}
        return self._client(
            self.settings.mqtt.model_copy(update=login), f"{prefix}/{name}/inbox", f"{prefix}/{name}/outbox"
        )

    def job_client(self, job_id: str, secret: str) -> Client:
        """A client of a job with this secret."""
        mqtt, prefix = job_broker(self.settings.mqtt, job_id, secret), self.settings.mqtt.topic_prefix
        assert mqtt.username is not None
        assert self.service.wait_effective(mqtt.username, EFFECTIVE_S)
        return self._client(mqtt, f"{prefix}/{job_id}/receipts", f"{prefix}/{job_id}/events")

    def _client(self, mqtt: MqttSettings, reads: str, writes: str) -> Client:
        found = Client(mqtt, reads, writes)
        self._ends.callback(found.close)
        return found


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The settings of the stack's Mosquitto, with passwords and ACL."""
    with LocalStack(settings_in(tmp_path_factory.mktemp("paused") / "a folder"), ("mosquitto",)) as stack:
        yield stack.settings


@pytest.fixture
def accounts(settings: Settings) -> Iterator[Accounts]:
    with ExitStack() as ends:
        yield Accounts(settings, ends)


@pytest.mark.mosquitto
def test_a_paused_account_publishes_nothing_still_reads_and_publishes_again_after_the_end(
    accounts: Accounts, settings: Settings
) -> None:
    job_id, secret = accounts.log.register()
    before = accounts.job_client(job_id, secret)
    after = accounts.job_client(job_id, accounts.log.rotate(job_id, 600))
    loud, calm, job = accounts.agent_client("loud"), accounts.agent_client("calm"), accounts.log.register()
    other = accounts.job_client(*job)
    paused, others = (before, after, loud), (calm, other)
    # A slow machine gets a longer pause: this counts only if all was seen before its end.
    for pause_s in (3, 9, 27):
        assert all(one.may_publish() for one in (*paused, *others))
        began = time.monotonic()
        accounts.service.pause(job_id, pause_s)
        accounts.service.pause(mqtt_user("loud"), pause_s)
        wait_until(lambda: not any(one.may_publish() for one in paused), 2, "the broker refuses them")
        publish = [one.may_publish() for one in others]
        # Also a client that does not wait for the answers keeps its connection.
        reasons = loud.flood(2000)
        operator = MqttConnection(role_mqtt(settings, OPERATOR))
        operator.open()
        text = f"for you {pause_s}".encode()
        for one in paused:
            assert not operator.publish_and_wait(one.reads, text).is_failure
        operator.close()
        wait_until(lambda text=text: all(text in one.received for one in paused), 5, "they read")
        is_in_time = time.monotonic() - began < pause_s
        wait_until(lambda: all(one.may_publish() for one in paused), pause_s + 10, "the pause is over")
        if is_in_time:
            break
    assert is_in_time
    assert publish == [True, True]
    assert reasons == {NOT_AUTHORIZED}
    assert pause_s <= time.monotonic() - began < 2 * pause_s


@pytest.mark.mosquitto
def test_a_paused_agent_keeps_its_message_and_says_why(
    accounts: Accounts, settings: Settings, tmp_path: Path
) -> None:
    credentials = mailbox_credentials(settings, "ann", accounts.agent("ann"))
    accounts.service.pause(mqtt_user("ann"), PAUSE_S)
    acl, rule = accounts.service._folder / ACL, f"topic deny {settings.mqtt.agents_prefix}/ann/outbox\n"
    wait_until(lambda: rule in acl.read_text(), 2, "the pause has begun")
    with MqttAgent(
        credentials, tmp_path, lambda _: None, broker=with_mqtt(settings, receipt_timeout_s=1).mqtt
    ) as agent:
        with pytest.raises(BackboneUnreachable) as error:
            agent.send("bob", "note", "x")
        assert re.search(r"too many messages in a minute.*Not authorized.*seq 1 stays", str(error.value))
        with agent._open_outbox() as outbox:
            assert [one.seq for one in outbox.pending] == [1]


@pytest.mark.mosquitto
def test_a_paused_job_keeps_its_event_and_publishes_it_again_until_the_pause_is_over(
    accounts: Accounts, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_delivery, "PUBLISH_AGAIN_S", 0.1)
    job_id, secret = accounts.log.register()
    watch = accounts.job_client(job_id, secret)
    accounts.service.pause(job_id, 2)
    wait_until(lambda: not watch.may_publish(), 2, "the pause has begun")
    short, long = (with_mqtt(settings, receipt_timeout_s=seconds) for seconds in (0.3, EFFECTIVE_S))
    with pytest.raises(Refused, match=r"too many messages in a minute.*Not authorized"):
        Job(job_id, secret, mqtt=short.mqtt, state_dir=tmp_path).publish("started", "", wait_for_receipt=False)
    assert not watch.may_publish()
    assert Job(job_id, secret, mqtt=long.mqtt, state_dir=tmp_path).resend(wait_for_receipt=False) == 1
    assert watch.may_publish()


def test_a_longer_pause_is_not_shortened_and_each_begin_and_end_is_reported_once() -> None:
    now = [100.0]
    pauses = AccountPauses(lambda: now[0])
    assert (pauses.has_new, pauses.next_end(500.0)) == (False, 500.0)
    pauses.pause("a", 60)
    pauses.pause("a", 10)
    pauses.pause("b", 20)
    assert (pauses.has_new, pauses.next_end(500.0), pauses.next_end(90.0)) == (True, 120.0, 90.0)
    assert pauses.turn() == (["a", "b"], [])
    assert (pauses.has_new, pauses.applied) == (False, {"a", "b"})
    now[0] = 120.0
    assert pauses.turn() == ([], ["b"])
    pauses.pause("b", 5)
    assert pauses.has_new
    now[0] = 160.0
    assert pauses.turn() == ([], ["a"])
    assert (pauses.turn(), pauses.applied) == (([], []), frozenset())
