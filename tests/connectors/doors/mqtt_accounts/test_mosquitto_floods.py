"""A flood of connections at the stack's own Mosquitto: who still gets in, and what the port's bound is."""

from __future__ import annotations

import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from connectors.plumbing.mqtt_link.broker_settings import BRIDGE, DELEGATOR, OPERATOR, role_mqtt
from connectors.plumbing.tls_keys.tls_files import create
from connectors.programs.local_stack import LocalStack, mosquitto_plan
from schemas.settings.settings import MqttSettings, Settings
from tests.broker_processes import LOOPBACK, wait_until, with_mqtt
from tests.connection_flood import Flood, assert_slows_nobody, flooding
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.mqtt_wire import listening, publish_all
from trunkline_agent.broker import private_socket
from trunkline_agent.mqtt.mqtt_client import LoginAnswer, try_login

pytestmark = [pytest.mark.requirement("SE-14"), pytest.mark.mosquitto]

CONNECTIONS = 40


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mosquitto whose port takes few connections."""
    monkeypatch.setattr(mosquitto_plan, "_MQTT_CONNECTIONS", CONNECTIONS)


@pytest.fixture
def settings(small: None, tmp_path: Path) -> Iterator[Settings]:
    """Settings of a running Mosquitto."""
    # A path that is too long for the address of a Unix socket.
    with LocalStack(settings_in(tmp_path / ("long " * 20)), ("mosquitto",)) as stack:
        yield stack.settings


def login(mqtt: MqttSettings) -> LoginAnswer:
    return try_login(mqtt, mqtt.username, mqtt.password.get_secret_value() if mqtt.password else None, 5)


def logins(places: list[MqttSettings]) -> list[float]:
    taken = []
    for _ in range(40):
        for mqtt in places:
            began = time.monotonic()
            assert login(mqtt) is LoginAnswer.LET_IN
            taken.append(time.monotonic() - began)
    return taken


@pytest.mark.undisturbed
def test_with_the_port_used_up_the_roles_still_log_in_and_events_still_flow(settings: Settings) -> None:
    roles = [role_mqtt(settings, role) for role in (OPERATOR, BRIDGE, DELEGATOR)]
    floods = [Flood(settings.mqtt.port, "silent", 2 * CONNECTIONS)]
    with listening(roles[0], "#") as heard, flooding(floods):
        # Nobody gets in by the port.
        public = roles[0].model_copy(update={"socket_dir": None})
        assert login(public) is LoginAnswer.SILENT
        publish_all(roles[1], [("0a1b2c3d/receipts", b"gets through")])
        wait_until(lambda: [one.payload for one in heard] == [b"gets through"], 10, "the message")
    assert_slows_nobody(floods, lambda: logins(roles))


def test_the_private_socket_is_for_our_own_user_alone(settings: Settings) -> None:
    path = private_socket(role_mqtt(settings, OPERATOR))
    assert path is not None
    folder = path.parent
    assert folder.stat().st_mode & 0o077 == 0
    said = "import os, sys; os.setuid(65534); print(os.access(sys.argv[1], os.F_OK))"
    asked = subprocess.run(
        ["python3", "-c", said, str(path)], capture_output=True, text=True, timeout=30, check=True
    )
    assert asked.stdout.strip() == "False"


def test_on_the_private_socket_nobody_gets_in_without_an_account(settings: Settings) -> None:
    private = role_mqtt(settings, OPERATOR)
    assert try_login(private) is LoginAnswer.REFUSED
    assert try_login(private, OPERATOR, "wrong") is LoginAnswer.REFUSED


def test_another_broker_on_loopback_is_not_reached_by_our_socket(settings: Settings) -> None:
    private = role_mqtt(settings, OPERATOR)
    assert private_socket(private.model_copy(update={"port": private.port + 1})) is None
    assert private_socket(private.model_copy(update={"host": "example.com"})) is None


def test_the_socket_needs_no_certificate_and_is_there_again_after_a_kill(small: None, tmp_path: Path) -> None:
    made = create(tmp_path / "keys" / "tls", mutual=True)
    operator_files = made.of(f"clients/{OPERATOR}")
    settings = with_mqtt(
        settings_in(tmp_path),
        tls=True,
        ca_certs=made.of("ca").certificate,
        require_client_cert=True,
        certfile=operator_files.certificate,
        keyfile=operator_files.key,
    )
    for _ in range(2):
        with LocalStack(settings, ("mosquitto",)) as stack:
            operator = role_mqtt(stack.settings, OPERATOR)
            assert login(operator.model_copy(update={"certfile": None, "keyfile": None})) is LoginAnswer.LET_IN
            pid_file = stack.settings.mqtt.accounts_dir / "mosquitto.pid"
            psutil.Process(int(pid_file.read_text())).kill()


def test_mosquitto_gets_as_many_descriptors_as_its_port_takes_connections(tmp_path: Path) -> None:
    with LocalStack(settings_in(tmp_path), ("mosquitto",)) as stack:
        pid = int((stack.settings.mqtt.accounts_dir / "mosquitto.pid").read_text())
        soft, _ = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert soft == min(10_256, hard)
        conf = (stack.settings.data_path / "mosquitto" / "mosquitto.conf").read_text()
        assert f"max_connections {soft - 256}\n" in conf
        # More idle ones than blocked everybody before; the port still takes a login.
        held = [socket.create_connection((LOOPBACK, stack.settings.mqtt.port)) for _ in range(1100)]
        try:
            public = role_mqtt(stack.settings, OPERATOR).model_copy(update={"socket_dir": None})
            assert login(public) is LoginAnswer.LET_IN
        finally:
            for connection in held:
                connection.close()
