"""Client ids at the stack's own Mosquitto: several connections of one account, and ids bound to user names."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from connectors.cli.doctor.brokers import check_client_ids
from connectors.cli.doctor.findings import OK
from connectors.doors.mqtt_accounts.mosquitto_files import (
    PASSWORDS,
    password_line,
    read_lines,
    reload_broker,
    write_lines,
)
from connectors.plumbing.mqtt_link.broker_settings import BRIDGE, DELEGATOR, role_mqtt
from connectors.programs.local_stack import LocalStack
from connectors.tools.job_tools.job_watcher import EventSubscription, Message
from schemas.settings.settings import MqttSettings, Settings
from tests.broker_processes import wait_until, with_mqtt
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.mqtt_wire import publish_all
from trunkline_agent.broker import Broker, clear_password, job_broker
from trunkline_agent.mqtt.mqtt_client import LoginAnswer, try_login
from trunkline_agent.mqtt.mqtt_connection import MqttConnection
from trunkline_agent.wire.mqtt_password import mqtt_password

pytestmark = [pytest.mark.requirement("JE-31"), pytest.mark.mosquitto]
JOB, OTHER, SECRET = "0a1b2c3d", "4e5f6a7b", "a secret"


@contextmanager
def mosquitto(folder: Path, **mqtt: object) -> Iterator[Settings]:
    """The stack's Mosquitto with the accounts of two jobs."""
    with LocalStack(with_mqtt(settings_in(folder), **mqtt), ("mosquitto",)) as stack:
        accounts = stack.settings.mqtt.accounts_dir
        lines = read_lines(accounts / PASSWORDS)
        lines |= {user: password_line(user, mqtt_password(SECRET, user)) for user in (JOB, OTHER)}
        write_lines(accounts / PASSWORDS, lines.values())
        assert reload_broker(accounts)
        mine = worker(stack.settings)
        wait_until(lambda: try_login(mine, mine.username, clear_password(mine)) is LoginAnswer.LET_IN, what=JOB)
        yield stack.settings


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    with mosquitto(tmp_path_factory.mktemp("free") / "data") as settings:
        yield settings


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    with mosquitto(tmp_path_factory.mktemp("bound") / "data", user_is_client_id=True) as settings:
        yield settings


def worker(settings: Settings, job: str = JOB) -> Broker:
    """The broker's settings as the worker of a job uses them."""
    return job_broker(settings.mqtt, job, SECRET)


def at_the_port(mqtt: MqttSettings) -> MqttSettings:
    """The login of a role as a program on another machine uses it."""
    return mqtt.model_copy(update={"socket_dir": None})


@contextmanager
def opened(*connections: MqttConnection) -> Iterator[None]:
    with ExitStack() as stack:
        for connection in connections:
            stack.callback(connection.drop)
            connection.open()
        yield


def is_taken_over(first: MqttConnection) -> bool:
    """Return whether another connection has ended this one. Otherwise the broker answers one more publish."""
    if not first.lost.is_set():
        first.publish_and_wait("nobody/reads/this", b"")
    return first.lost.is_set()


@pytest.mark.parametrize("place", [at_the_port, lambda mqtt: mqtt], ids=["port", "socket"])
def test_two_watchers_and_publishers_share_an_account_and_none_is_cut_off(
    free: Settings, place: Callable[[MqttSettings], MqttSettings]
) -> None:
    delegator = place(role_mqtt(free, DELEGATOR))
    lost: list[str | None] = []
    found: list[queue.Queue[Message]] = [queue.Queue(), queue.Queue()]
    topics = [f"{delegator.topic_prefix}/{JOB}/events"]
    reader = MqttConnection(worker(free), client_id="a reader of receipts")
    with (
        EventSubscription(delegator, topics, found[0], lost=lost.append),
        EventSubscription(delegator, topics, found[1], lost=lost.append),
        opened(reader),
    ):
        for number in range(10):  # each with a connection of its own
            publish_all(worker(free), [(f"{JOB}/events", b"%d" % number)])
        for one in found:
            assert [one.get(timeout=10).payload for _ in range(10)] == [b"%d" % n for n in range(10)]
        assert not is_taken_over(reader)
    assert lost == []


def test_an_id_that_is_guessed_can_be_taken_over_without_the_setting(free: Settings) -> None:
    first, second = (MqttConnection(worker(free, job), client_id="worker-1") for job in (JOB, OTHER))
    with opened(first, second):
        assert first.lost.wait(10)


def test_with_the_setting_no_account_takes_over_an_id_of_another_one(bound: Settings) -> None:
    bridge = role_mqtt(bound, BRIDGE)
    ids = ("trunkline-bridge", "agent.ann", "worker-1")
    firsts = [
        MqttConnection(bridge, client_id=ids[0], session_expiry_s=60),
        *(MqttConnection(worker(bound), client_id=one) for one in ids[2:]),
    ]
    with opened(*firsts):
        for client_id in ids:
            with opened(MqttConnection(worker(bound, OTHER), client_id=client_id)):
                assert not any(map(is_taken_over, firsts))


def test_with_the_setting_an_account_has_one_connection_at_the_port_and_many_at_the_socket(
    bound: Settings,
) -> None:
    first, second = (MqttConnection(worker(bound), client_id=one) for one in ("worker-1", "worker-2"))
    with opened(first, second):
        assert first.lost.wait(10)
    delegator = role_mqtt(bound, DELEGATOR)
    firsts = [MqttConnection(delegator, client_id=one) for one in ("one", "two", "")]
    with opened(*firsts):
        assert not any(map(is_taken_over, firsts))


def test_the_doctor_tries_whether_the_broker_binds_client_ids(
    free: Settings, bound: Settings, tmp_path: Path
) -> None:
    texts = [check_client_ids(settings) for settings in (free, bound)]
    assert [one.level for one in texts] == [OK, OK]
    assert "hands a client id over to any account" in texts[0].found
    assert "binds client ids to accounts" in texts[1].found
    alone = with_mqtt(free.model_copy(update={"data_dir": tmp_path}), username="one")
    assert check_client_ids(alone).found.startswith("not tried")
