"""Settings for several nodes of Kafka, and for a disk that has each batch before it is acknowledged."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from kafka.admin import ConfigResource, ConfigResourceType

from connectors.cli.stack.fold_command import check_doors_closed
from connectors.plumbing.tls_keys.tls_files import create
from connectors.programs.local_stack import LocalStack, child_process, free_port
from connectors.programs.local_stack.foreground import is_healthy
from connectors.programs.local_stack.stack import alone_lock, plans_of
from connectors.programs.local_stack.systemd_units import units
from schemas.log_access.event_topic import admin_client
from schemas.settings.settings import KafkaSettings, Settings
from tests.broker_processes import LOOPBACK
from tests.connectors.cli.test_doctor_parts import stack_of
from tests.own_settings import stack_settings
from trunkline_agent.errors import Refused, UsageError


def with_nodes(folder: Path, count: int, copies: int = 0, **more: object) -> Settings:
    """Settings of a stack with this many nodes of Kafka, and by default as many copies, at most three."""
    copies = copies or min(count, 3)
    servers = ",".join(f"{LOOPBACK}:{free_port()}" for _ in range(count))
    kafka = KafkaSettings.model_validate(
        {"bootstrap_servers": servers, "replication_factor": copies, "partitions": 2, **more}
    )
    return stack_settings(folder, kafka=kafka)


@pytest.mark.requirement("DP-07")
def test_each_address_is_a_node_with_a_name_a_folder_and_a_unit_of_its_own(tmp_path: Path) -> None:
    settings = with_nodes(tmp_path, 3, copies=3)
    plans = plans_of(settings, ["kafka"])
    assert [(plan.name, plan.group, plan.cwd) for plan in plans] == [
        (name, "kafka", tmp_path / name) for name in ("kafka", "kafka_2", "kafka_3")
    ]
    made = units([*(plan.name for plan in plans), "gateway"], data_dir=tmp_path)
    after = "After=network.target trunkline-kafka.service trunkline-kafka-2.service trunkline-kafka-3.service"
    assert after in made["trunkline-gateway.service"].replace("network-online", "network")
    assert "trunkline-kafka" not in made["trunkline-kafka-2.service"].partition("After=")[2].partition("\n")[0]
    assert not is_healthy(settings, "kafka_3")
    with pytest.raises(UsageError, match=r"no such part: kafka_4; the settings want kafka, kafka_2, kafka_3"):
        is_healthy(settings, "kafka_4")


@pytest.mark.requirement("DP-10")
def test_a_number_of_nodes_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for count, copies, told in (
        (2, 2, "has two addresses: of two nodes none may fail"),
        (1, 3, r"replication_factor is 3, and kafka.bootstrap_servers has 1 node\(s\).*--profile durable"),
        (3, 1, r"replication_factor is 1, and kafka.bootstrap_servers has 3 node\(s\): .* at least three have"),
        (3, 2, "replication_factor is 2, and"),
    ):
        with pytest.raises(UsageError, match=told):
            LocalStack(with_nodes(tmp_path, count, copies), ("kafka",))
    one, three = tmp_path / "one", tmp_path / "three"
    (one / "kafka" / "log").mkdir(parents=True)
    (one / "kafka" / "log" / "meta.properties").touch()
    three.mkdir()
    cluster = {"id": "x", "ports": [[1, 2], [3, 4], [5, 6]], "is_founded": True}
    (three / "kafka-cluster.json").write_text(json.dumps(cluster))
    with pytest.raises(UsageError, match=r"folders of all nodes of Kafka are empty.*kafka-cluster\.json"):
        LocalStack(with_nodes(three, 3), ("kafka",))
    for name in ("kafka", "kafka_2", "kafka_3"):
        (three / name / "log").mkdir(parents=True)
        (three / name / "log" / "meta.properties").touch()
    moved = tmp_path / "moved"
    shutil.copytree(one / "kafka", moved / "kafka.before")
    assert len(plans_of(with_nodes(moved, 3), ["kafka"])) == 3, "the node before was moved away"
    for folder, count in ((one, 3), (three, 1), (three, 5)):
        with pytest.raises(UsageError, match=rf"has {count} address.*a number that cannot change"):
            LocalStack(with_nodes(folder, count), ("kafka",))
    for folder, count in ((one, 1), (three, 3)):
        assert len(plans_of(with_nodes(folder, count), ["kafka"])) == count
    shutil.rmtree(three / "kafka")
    assert len(plans_of(with_nodes(three, 3), ["kafka"])) == 3, "a node may have lost its disk"
    (three / "kafka-cluster.json").unlink()
    (three / "kafka" / "log").mkdir(parents=True)
    (three / "kafka" / "log" / "meta.properties").touch()
    with pytest.raises(
        UsageError, match=r"kafka-cluster\.json is missing, and kafka, kafka_2, kafka_3 have data"
    ):
        LocalStack(with_nodes(three, 3), ("kafka",))
    with pytest.raises(UsageError, match=r"has 1 address.* has the data of 3 node"):
        LocalStack(with_nodes(three, 1), ("kafka",))


@pytest.mark.requirement("DP-01")
@pytest.mark.requirement("DP-07")
def test_the_doors_are_closed_while_nodes_of_kafka_run_and_open_while_a_door_runs_by_itself(
    tmp_path: Path,
) -> None:
    settings, ready = with_nodes(tmp_path, 3, copies=3), ("ready", 0, True)
    stack_of(settings, kafka=ready, kafka_2=ready, kafka_3=ready, mosquitto=ready)
    check_doors_closed(settings)
    lock = alone_lock(settings, "files")
    lock.touch()
    check_doors_closed(settings)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="the doors are open: files run"):
            check_doors_closed(settings)
    stack_of(settings, kafka_2=ready, xml_pump_2=ready)
    with pytest.raises(Refused, match="the doors are open: xml_pump_2 run"):
        check_doors_closed(settings)


@pytest.mark.stack
@pytest.mark.requirement("DP-11")
def test_the_brokers_disk_has_each_batch_before_it_is_acknowledged_if_the_settings_say_so(
    tmp_path: Path,
) -> None:
    for is_synced, batches in ((True, "1"), (False, str(2**63 - 1))):
        settings = with_nodes(tmp_path / str(is_synced), 1, sync_each_batch=is_synced)
        try:
            with LocalStack(settings, ("kafka",)), admin_client(settings.kafka) as admin:
                node = ConfigResource(ConfigResourceType.TOPIC, settings.kafka.topic)
                found = admin.describe_configs([node], config_filter="all")["topic"][settings.kafka.topic]
        finally:
            child_process.kill_marked(child_process.mark_of(settings.data_path, ""))
        assert found["flush.messages"]["value"] == batches


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.requirement("DP-07")
@pytest.mark.parametrize("protocol", ["SASL_SSL", "PLAINTEXT"])
def test_three_nodes_start_with_each_other_protocol(tmp_path: Path, protocol: str) -> None:
    made = create(tmp_path / "keys" / "tls")
    settings = with_nodes(
        tmp_path, 3, copies=3, security_protocol=protocol, ssl_ca_certs=made.of("ca").certificate
    )
    try:
        with LocalStack(settings, ("kafka",)) as stack:
            assert [part.state for part in stack.parts.values()] == ["ready"] * 3
    finally:
        child_process.kill_marked(child_process.mark_of(settings.data_path, ""))
