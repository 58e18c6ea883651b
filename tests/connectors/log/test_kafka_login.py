"""The local stack's Kafka under TLS with a login by SCRAM: who gets in, who does not and what they are told."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr, ValidationError

from connectors.log.log_end import LogEnd
from connectors.log.publisher import Publisher
from connectors.log.topic_consumer import LogTail
from connectors.plumbing.tls_keys.tls_files import client_name, create
from connectors.programs.local_stack import LocalStack
from connectors.programs.local_stack.kafka_login import InternalListener, ensure_scram_user
from connectors.programs.local_stack.kafka_plan import kafka_plan
from schemas.log_access import event_topic
from schemas.log_access.event_topic import admin_client, check_topic
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE, kafka_password, spark_security
from schemas.settings.settings import (
    KafkaSettings,
    Settings,
    SettingsError,
    load_settings,
    settings_environment,
)
from schemas.wire.record import OutgoingRecord, read_envelope
from tests.broker_processes import LOOPBACK, program_environment, wait_until, with_kafka
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.programs import run_program
from trunkline_agent.errors import BackboneUnreachable, UsageError

pytestmark = [pytest.mark.requirement("JE-23"), pytest.mark.kafka]

PASSWORD = "canary-0f1e2d3c"
SPARK_S = 120


def login(folder: Path, **changes: Any) -> Settings:
    """Settings of a stack whose Kafka wants a login."""
    made = create(folder / "keys" / "tls", mutual=True)
    wanted: dict[str, Any] = {
        "security_protocol": "SASL_SSL",
        "sasl_username": "trunkline",
        "sasl_password": SecretStr(PASSWORD),
        "ssl_ca_certs": made.of("ca").certificate,
    }
    return with_kafka(settings_in(folder), **wanted | changes)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The stack's Kafka for the whole file."""
    with LocalStack(login(tmp_path_factory.mktemp("kafka") / "a folder"), ("kafka",)) as found:
        yield found


@pytest.fixture
def settings(stack: LocalStack) -> Settings:
    return stack.settings


def record(number: int) -> OutgoingRecord:
    return OutgoingRecord("job/0a1b2c3d", f"id-{number}", "mqtt", "unverified", "job.event", b"{}")


def test_the_publisher_writes_and_the_live_views_tail_reads(settings: Settings) -> None:
    kafka = settings.kafka
    check_topic(settings)
    with Publisher(settings) as publisher:
        positions = [publisher.append(record(number)).result(10) for number in range(3)]
    with closing(LogEnd(kafka)) as log_end:
        ends = log_end.offsets(10)
    assert ends[positions[0].partition] == positions[-1].offset + 1
    with LogTail(kafka, {}) as tail:
        seen: set[str] = set()

        def are_there() -> bool:
            seen.update(read_envelope(one).ce_id for one in tail.poll(1.0))
            return len(seen) >= 4 + kafka.partitions  # with the first ones of the topic

        wait_until(are_there, what="the records")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"sasl_password": SecretStr("wrong")},
            r"Authentication failed.*kafka\.sasl_username, sasl_password and sasl_mechanism",
        ),
        ({"security_protocol": "SSL"}, r"kafka\.security_protocol SSL what it wants"),
        ({"topic": "nowhere"}, r"topic does not exist \(Broker: Unknown topic or partition\)$"),
    ],
    ids=["wrong password", "no login", "no topic"],
)
def test_the_live_views_tail_says_that_it_is_not_let_in(
    settings: Settings, changes: dict[str, Any], told: str
) -> None:
    with (
        LogTail(with_kafka(settings, **changes).kafka, {}) as tail,
        pytest.raises(BackboneUnreachable, match=told) as caught,
    ):
        wait_until(lambda: tail.poll(0.2), what="a record that is not for us")
    assert PASSWORD not in str(caught.value)


def test_who_asks_where_the_log_ends_with_a_wrong_password_is_told_so(settings: Settings) -> None:
    wrong = with_kafka(settings, sasl_password=SecretStr("wrong")).kafka
    with (
        closing(LogEnd(wrong)) as log_end,
        pytest.raises(BackboneUnreachable, match=r"Authentication failed.*kafka\.sasl_username") as caught,
    ):
        log_end.offsets(3)
    assert PASSWORD not in str(caught.value)


@pytest.mark.slow
def test_spark_reads_and_shows_the_password_nowhere(settings: Settings, tmp_path: Path) -> None:
    with Publisher(settings) as publisher:
        publisher.append(record(7)).result(10)
    with closing(LogEnd(settings.kafka)) as log_end:
        there = sum(log_end.offsets(10).values())
    done = run_program(
        [sys.executable, "-m", "tests.jobs.sasl_reader", str(tmp_path)],
        timeout_s=SPARK_S,
        env=program_environment(settings),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["records"] == there
    # Spark was told to log all it has to say, and printed plans, settings and command lines.
    assert "sasl.jaas.config" in done.stderr and "canary" not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"canary" in path.read_bytes()]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sasl_password": SecretStr("wrong")}, r"kafka\.sasl_username, sasl_password and sasl_mechanism"),
        ({"sasl_username": "nobody"}, r"kafka\.sasl_username, sasl_password and sasl_mechanism"),
        ({"security_protocol": "SSL"}, r"kafka\.security_protocol SSL what it wants"),
        ({"security_protocol": "PLAINTEXT"}, r"speaks TLS, and kafka\.security_protocol is PLAINTEXT"),
        ({"ssl_ca_certs": None}, r"not trusted .*kafka\.ssl_ca_certs"),
    ],
    ids=["wrong password", "unknown user", "no login", "plaintext", "wrong authority"],
)
def test_who_does_not_fit_is_refused_and_told_which_setting_to_look_at(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    # The client tries for as long as it may; a busy machine, on which it has not got to the login by then, has
    # more time.
    for within_s in (1.5, 10.0):
        monkeypatch.setattr(event_topic, "REACH_TIMEOUT_S", within_s)
        with pytest.raises(BackboneUnreachable) as caught, admin_client(with_kafka(settings, **changes).kafka):
            pass
        assert PASSWORD not in str(caught.value)
        if re.search(told, str(caught.value)):
            break
    caught.match(told)


def internal_port(settings: Settings) -> int:
    """The port of the broker's own listener, which only its own certificate opens."""
    text = (settings.data_path / "kafka" / "server.properties").read_text()
    return int(re.findall(r"^listeners=.*INTERNAL://[^:,]+:(\d+)", text, re.MULTILINE)[0])


def gets_in(settings: Settings) -> bool:
    """True if Kafka lets this user in."""
    try:
        with admin_client(settings.kafka) as admin:
            admin.list_topics()
    except BackboneUnreachable:
        return False
    return True


def test_after_another_user_name_is_set_the_one_before_opens_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_topic, "REACH_TIMEOUT_S", 1.5)
    renamed = with_kafka(settings, sasl_username="renamed", sasl_password=SecretStr("another-password"))
    for now, before in ((renamed, settings), (settings, renamed)):
        assert gets_in(before)
        ensure_scram_user(now, InternalListener(internal_port(settings), password=""))
        wait_until(functools.partial(gets_in, now), 15, "the new user to get in")
        wait_until(lambda before=before: not gets_in(before), 15, "the old user to be refused")
        assert gets_in(now), "the one that is set stays"


def test_a_certificate_of_a_client_does_not_open_the_brokers_own_listeners(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_topic, "REACH_TIMEOUT_S", 1.5)
    text = (settings.data_path / "kafka" / "server.properties").read_text()
    listeners = next(line for line in text.splitlines() if line.startswith("listeners="))
    ports = [int(one.rpartition(":")[2]) for one in listeners.split(",")]
    agent = create(settings.tls_path).of(client_name("agent"))
    as_agent = {"security_protocol": "SSL", "ssl_certfile": agent.certificate, "ssl_keyfile": agent.key}
    internal = create(settings.tls_path).of("kafka-internal").certificate
    assert len(ports) == 3
    for port in ports[1:]:
        there = {"bootstrap_servers": f"{LOOPBACK}:{port}", "ssl_ca_certs": internal}
        with (
            pytest.raises(BackboneUnreachable),
            admin_client(with_kafka(settings, **as_agent | there).kafka) as admin,
        ):
            admin.list_topics()


def test_no_password_is_in_a_command_line_a_file_of_the_broker_or_its_log(
    settings: Settings, stack: LocalStack
) -> None:
    assert PASSWORD not in " ".join(psutil.Process(stack["kafka"].pid).cmdline())
    files = [path for path in settings.data_path.rglob("*") if path.is_file()]
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]
    assert any(path.name == "kafka.log" for path in files)


def test_spark_is_told_where_the_password_is_and_never_what_it_is(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=rf"kafka\.sasl_password: .*{PASSWORD_VARIABLE}"):
        spark_security(settings.kafka)
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    assert PASSWORD not in json.dumps(spark_security(settings.kafka))
    assert spark_security(KafkaSettings(security_protocol="PLAINTEXT")) == {}


@pytest.mark.requirement("CM-05")
def test_the_password_comes_from_the_environment_or_a_private_file_and_is_told_to_nobody(
    tmp_path: Path,
) -> None:
    file, empty = tmp_path / "kafka.password", Path("/dev/null")
    given = {"TRUNKLINE__KAFKA__SECURITY_PROTOCOL": "SASL_SSL", "TRUNKLINE__KAFKA__SASL_USERNAME": "ann"}
    with pytest.raises(SettingsError, match=r"sasl_password and kafka\.sasl_password_file are missing"):
        kafka_password(KafkaSettings())
    given["TRUNKLINE__KAFKA__SASL_PASSWORD_FILE"] = str(file)
    kafka = load_settings(given, empty).kafka
    with pytest.raises(SettingsError, match=r"kafka\.sasl_password_file: .* is missing\. .*trunkline up"):
        kafka_password(kafka)
    file.write_text(f"{PASSWORD}\n")
    file.chmod(0o640)
    with pytest.raises(SettingsError, match=f"chmod 600 {file}"):
        kafka_password(kafka)
    file.chmod(0o600)
    assert kafka_password(kafka) == PASSWORD and PASSWORD not in repr(kafka)
    child = load_settings(settings_environment(load_settings(given, empty)), empty)
    assert kafka_password(child.kafka) == PASSWORD
    assert kafka_password(load_settings({**given, PASSWORD_VARIABLE: "other"}, empty).kafka) == "other"
    file.write_text('canary"; x="')
    with pytest.raises(SettingsError, match="quotes and backslashes") as in_file:
        kafka_password(kafka)
    assert "canary" not in str(in_file.value)
    in_conf = tmp_path / "conf.yaml"
    in_conf.write_text("kafka: {sasl_password: canary}\n")
    with pytest.raises(SettingsError, match="never from a file of conf") as caught:
        load_settings({}, in_conf)
    with pytest.raises(SettingsError, match="quotes and backslashes") as quoted:
        load_settings({**given, PASSWORD_VARIABLE: 'canary"; x="'}, empty)
    assert "canary" not in str(caught.value) + str(quoted.value)
    with pytest.raises(ValidationError, match="sasl_username: only printable ASCII"):
        KafkaSettings(sasl_username="")


def test_the_local_stack_says_what_it_does_not_have(tmp_path: Path) -> None:
    for changes, told in (
        ({"security_protocol": "SSL"}, r"kafka\.security_protocol is SSL"),
        ({"sasl_mechanism": "PLAIN"}, r"kafka\.sasl_mechanism is PLAIN"),
        ({"ssl_ca_certs": None}, r"kafka\.ssl_ca_certs is not set"),
    ):
        with pytest.raises(UsageError, match=told):
            kafka_plan(login(tmp_path / "made", **changes))
    bare = login(tmp_path / "made").model_copy(update={"data_dir": tmp_path / "bare"})
    with pytest.raises(UsageError, match=r"run \./trunkline tls create"):
        kafka_plan(bare)


@pytest.mark.parametrize("name", ["kafka.pem", "kafka-internal.pem"])
def test_the_local_stacks_kafka_takes_no_key_that_others_can_read(tmp_path: Path, name: str) -> None:
    settings = login(tmp_path / "made")
    assert kafka_plan(settings).name == "kafka"
    key = settings.tls_path / name
    key.chmod(0o644)
    with pytest.raises(UsageError, match=f"run: chmod 600 {key}"):
        kafka_plan(settings)
    key.unlink()
    with pytest.raises(UsageError, match=rf"needs .*{name}: run \./trunkline tls create"):
        kafka_plan(settings)
