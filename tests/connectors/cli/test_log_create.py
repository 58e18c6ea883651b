"""`trunkline log create` at a Kafka of two brokers, and what the doctor says of its replicas."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka.admin import NewTopic

from connectors.cli.doctor.brokers import check_kafka, check_replicas
from connectors.cli.doctor.findings import FAIL, OK, WARN
from connectors.cli.main import main
from connectors.log.kafka_libraries import repair_kafka_client
from connectors.programs.local_stack import free_port
from schemas.log_access.event_topic import admin_client, topic_config
from schemas.settings.settings import Settings, SettingsError, load_settings, settings_environment
from schemas.streams.control.control_fold import Topology
from tests.broker_processes import BrokerProcess, kafka_at, make_kafka, wait_until, with_kafka
from tests.raw_records import append_raw, raw

pytestmark = [pytest.mark.requirement("OP-11"), pytest.mark.kafka]

START_S = 60


def make_second(first: BrokerProcess, folder: Path) -> BrokerProcess:
    """Return a formatted broker of the cluster of `first`, whose controller it uses, not started yet."""
    home = first.log_path.parent
    (cluster,) = re.findall(r"cluster\.id=(\S+)", (home / "log" / "meta.properties").read_text())
    text, port = (home / "server.properties").read_text(), free_port()
    controller = re.findall(r",CONTROLLER://\S+", text)[0]
    text = text.replace("process.roles=broker,controller", "process.roles=broker")
    text = text.replace("node.id=1\n", "node.id=2\n").replace(controller, "")
    text = text.replace(f":{first.port}", f":{port}").replace(str(home), str(folder))
    folder.mkdir()
    properties = folder / "server.properties"
    properties.write_text(text)
    java = first.command[: first.command.index("kafka.Kafka")]
    tool = [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)]
    subprocess.run(tool, capture_output=True, timeout=START_S, check=True)
    return BrokerProcess([*java, "kafka.Kafka", str(properties)], port, folder / "kafka.log")


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, BrokerProcess]]:
    """A cluster of two brokers."""
    repair_kafka_client()  # without it the library leaves the sockets open that a killed broker refuses
    folder = tmp_path_factory.mktemp("cluster")
    first = make_kafka(folder / "first", "broker.session.timeout.ms=2000\nbroker.heartbeat.interval.ms=500\n")
    first.start()
    second = make_second(first, folder / "second")
    second.start()
    yield first, second
    second.kill()
    first.kill()


@pytest.fixture
def settings(brokers: tuple[BrokerProcess, BrokerProcess], tmp_path: Path) -> Settings:
    """Settings for a topic on both of them."""
    kafka = kafka_at(
        brokers[0].port, topic=f"test.{tmp_path.name}", replication_factor=2, min_in_sync_replicas=2
    )
    return Settings(data_dir=tmp_path / "data", kafka=kafka)


@pytest.fixture
def topic_command(monkeypatch: pytest.MonkeyPatch):
    """Runs `trunkline log create` with these settings."""

    def run(settings: Settings, *arguments: str) -> int:
        for name, value in settings_environment(settings).items():
            monkeypatch.setenv(name, value)
        return main(["log", "create", *arguments])

    return run


def test_the_topic_is_made_once_with_its_replicas_and_a_lost_broker_is_named(
    settings: Settings, brokers: tuple[BrokerProcess, BrokerProcess], topic_command, capsys
):
    missing = check_kafka(settings)
    assert missing.level == FAIL and missing.mend == "./trunkline log create"
    wait_until(lambda: topic_command(settings, "--json") == 0, 20, "both brokers take part")
    made = json.loads(capsys.readouterr().out)
    assert made == {
        "topic": settings.kafka.topic,
        "made": True,
        "partitions": 4,
        "epoch": 1,
        "replicas": 2,
        "min_in_sync": 2,
        "missing": {},
    }
    assert topic_command(settings) == 0
    assert capsys.readouterr().out.startswith("There already: topic ")
    assert check_kafka(settings).level == check_replicas(settings).level == OK
    fewer = with_kafka(settings, min_in_sync_replicas=1)
    assert check_replicas(fewer).level == WARN and "min.insync.replicas=1" in check_replicas(fewer).mend
    more = check_replicas(with_kafka(settings, replication_factor=3))
    assert more.level == WARN and "kafka.replication_factor is 3" in more.found
    brokers[1].kill()
    wait_until(lambda: check_replicas(settings).level == FAIL, 20, "the copies on the killed broker are missed")
    assert "partition 0: 1" in check_replicas(settings).found and "refuses" in check_replicas(settings).found


@pytest.mark.requirement("ST-04")
def test_a_topic_that_another_program_has_filled_is_refused(settings: Settings, topic_command, capsys):
    planted = with_kafka(settings, replication_factor=1, min_in_sync_replicas=1)
    with admin_client(planted.kafka) as admin:
        topic = NewTopic(planted.kafka.topic, 4, 1, topic_configs=topic_config(planted.kafka))
        admin.create_topics([topic])
        admin.wait_for_topics([topic.name], timeout_ms=10_000)
    append_raw(planted, [raw(Topology(partitions=4, epoch=1).record(door="stack", principal="operator"))])
    assert topic_command(planted) == 1
    assert "Another program may have made the topic: delete it" in capsys.readouterr().err


def test_more_replicas_in_sync_than_there_are_is_a_wrong_setting():
    with pytest.raises(SettingsError, match="min_in_sync_replicas is 3, above replication_factor 2"):
        load_settings(
            {
                "TRUNKLINE__KAFKA__REPLICATION_FACTOR": "2",
                "TRUNKLINE__KAFKA__MIN_IN_SYNC_REPLICAS": "3",
            },
            Path("/dev/null"),
        )
