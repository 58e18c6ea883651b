"""The stack's Kafka asks everybody for a login by default, and turning that off is called unsafe."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from connectors.cli.doctor.brokers import check_login
from connectors.cli.doctor.findings import OK, WARN
from connectors.log.log_end import LogEnd
from connectors.programs.local_stack import LocalStack
from schemas.log_access.kafka_clients import kafka_password
from schemas.settings.settings import Settings
from tests.broker_processes import with_kafka
from tests.connectors.programs.local_stack.conftest import Cli, settings_in
from tests.programs import run_program

pytestmark = [pytest.mark.requirement("SE-01"), pytest.mark.stack]

STRANGER_S = 120
ALL = ("listed", "read", "appended", "deleted")


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The stack's Kafka with the settings that everybody begins with."""
    with LocalStack(settings_in(tmp_path_factory.mktemp("login") / "a folder"), ("kafka",)) as found:
        yield found


def ports_of(settings: Settings) -> list[str]:
    """Return the ports of all listeners of the broker, the clients' first."""
    text = (settings.data_path / "kafka" / "server.properties").read_text()
    (listeners,) = re.findall(r"^listeners=(.*)$", text, re.MULTILINE)
    return [listener.rpartition(":")[2] for listener in listeners.split(",")]


def worked_for_a_stranger(settings: Settings) -> list[str]:
    """Return what uid 65534 could do. Only root can become another user, and CI is root; a developer who is not
    tries as himself, and can read his own files.
    """
    assert os.geteuid() == 0 or not os.environ.get("CI"), "CI must run this as root"
    program = [sys.executable, "-m", "tests.connectors.programs.local_stack.stranger"]
    done = run_program(
        [*program, settings.kafka.topic, str(settings.data_path), *ports_of(settings)], timeout_s=STRANGER_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    worked = list(json.loads(done.stdout))
    return worked if os.geteuid() == 0 else [one for one in worked if " at " in one]


def test_a_stranger_reads_appends_and_deletes_nothing_at_any_listener(kafka: LocalStack):
    settings = kafka.settings
    assert len(ports_of(settings)) == 3
    assert worked_for_a_stranger(settings) == []
    with closing(LogEnd(settings.kafka)) as log_end:
        first = 1 + settings.kafka.partitions
        assert sum(log_end.offsets(10).values()) == first, "the first records and nothing else"


def test_the_same_stranger_does_all_of_it_where_the_login_was_turned_off(tmp_path: Path):
    settings = with_kafka(settings_in(tmp_path / "a folder"), security_protocol="PLAINTEXT")
    with LocalStack(settings, ("kafka",)):
        port = ports_of(settings)[0]
        worked = worked_for_a_stranger(settings)
    assert {f"{done} at {port} by PLAINTEXT" for done in ALL} <= set(worked)


def test_the_password_is_random_private_and_nobodys_to_set(kafka: LocalStack):
    file = kafka.settings.data_path / "keys" / "kafka.password"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().strip() == kafka_password(kafka.settings.kafka)
    assert len(file.read_text().strip()) >= 43


def test_the_brokers_own_password_is_another_one_at_each_start(kafka: LocalStack):
    properties = kafka.settings.data_path / "kafka" / "server.properties"
    assert stat.S_IMODE(properties.stat().st_mode) == 0o600
    before = re.findall(r'user_broker="([^"]+)"', properties.read_text())
    kafka["kafka"].stop()
    kafka["kafka"].start()
    after = re.findall(r'user_broker="([^"]+)"', properties.read_text())
    assert len(set(before)) == len(set(after)) == 1 and set(before).isdisjoint(after)
    with closing(LogEnd(kafka.settings.kafka)) as log_end:
        assert log_end.offsets(10), "the clients' login is the same as before"


def test_doctor_and_status_call_a_kafka_without_login_unsafe(cli: Cli, tmp_path: Path):
    own = settings_in(tmp_path / "own")
    assert check_login(own).level == OK
    elsewhere = with_kafka(own, bootstrap_servers="kafka.example:9092", security_protocol="PLAINTEXT")
    for settings in (with_kafka(own, security_protocol="PLAINTEXT"), elsewhere):
        found = check_login(settings)
        assert found.level == WARN and "unsafe: kafka.security_protocol is PLAINTEXT" in found.found
    assert check_login(with_kafka(own, security_protocol="SSL")).level == WARN
    told = cli("status", TRUNKLINE__KAFKA__SECURITY_PROTOCOL="PLAINTEXT")
    assert "Unsafe: kafka.security_protocol is PLAINTEXT" in told.stdout
    told = cli("status", "--json", TRUNKLINE__KAFKA__SECURITY_PROTOCOL="PLAINTEXT")
    assert "operator" in json.loads(told.stdout)["unsafe"][0]
    assert json.loads(cli("status", "--json").stdout)["unsafe"] == []
