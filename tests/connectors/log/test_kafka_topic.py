"""The topic: partitions as Java chooses them, made once, and the check that every program makes."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType, NewPartitions, NewTopic

from connectors.cli.doctor.brokers import check_kafka
from connectors.log.kafka_topic import append_first_records, check_first_records, ensure_topic
from connectors.log.publisher import Publisher
from connectors.plumbing.tls_keys.master_keys import rotate
from connectors.programs.local_stack import free_port
from connectors.tools.log_rebuild.rebuilt_topic import topic_state
from schemas.keys.sealing import ensure_keyring
from schemas.log_access.event_topic import (
    TopicMismatchError,
    TopicMissingError,
    admin_client,
    check_topic,
    partition_count,
    topic_config,
)
from schemas.log_access.kafka_clients import client_options
from schemas.streams.control.control_fold import TOPOLOGY_STREAM, Topology
from schemas.streams.control.record_macs import macs_required_records
from schemas.streams.principal.principals import OPERATOR, PrincipalAddition
from schemas.wire.record import partition_for
from tests.broker_processes import wait_until, with_kafka
from tests.raw_records import append_raw, raw, read_to_end
from tests.settled_topic import settle_topic
from trunkline_agent.errors import BackboneUnreachable


def test_two_callers_at_once_make_one_topic_that_begins_with_its_topology(backbone_settings):
    settings = with_kafka(backbone_settings, topic=backbone_settings.kafka.topic + ".raced")
    errors = []

    def make():
        try:
            ensure_topic(settings)
        except Exception as error:
            errors.append(error)

    callers = [threading.Thread(target=make) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not errors
    records = list(read_to_end(settings.kafka))
    first = [
        Topology(partitions=4, epoch=1).record(door="stack", principal="operator"),
        *macs_required_records(4),
    ]
    assert {record.value for record in records} == {record.value for record in first}
    found = Counter(dict(record.headers)["ce_id"].decode() for record in records)
    assert set(found) == {record.ce_id for record in first}
    assert all(1 <= count <= 3 for count in found.values())
    ensure_topic(settings)
    assert len(list(read_to_end(settings.kafka))) == len(records)


def test_kafka_stamps_the_time_and_keeps_everything(backbone_settings):
    kafka = backbone_settings.kafka
    admin = KafkaAdminClient(**client_options(kafka))
    try:
        resource = ConfigResource(ConfigResourceType.TOPIC, kafka.topic)
        stored = admin.describe_configs([resource], config_filter="all")["topic"][kafka.topic]
    finally:
        admin.close()
    values = {name: stored[name]["value"] for name in stored}
    assert values["message.timestamp.type"] == "LogAppendTime"
    assert (values["retention.ms"], values["retention.bytes"]) == ("-1", "-1")
    assert values["max.message.bytes"] == str(kafka.record_limit_bytes)


def test_a_wrong_partition_count_is_refused_with_both_numbers_and_what_to_do(backbone_settings):
    wrong = with_kafka(backbone_settings, partitions=7)
    for refuse in (check_topic, ensure_topic):
        with pytest.raises(TopicMismatchError, match=r"7.*4.*kafka\.epoch") as caught:
            refuse(wrong)
        assert caught.value.exit_code == 1


def test_another_epoch_is_refused_with_both_numbers(backbone_settings):
    with pytest.raises(TopicMismatchError, match=r"epoch=1.*epoch=2.*new kafka\.topic"):
        check_topic(with_kafka(backbone_settings, epoch=2))


def test_another_record_limit_is_refused_with_both_numbers(backbone_settings):
    with pytest.raises(TopicMismatchError, match=r"max\.message\.bytes=1048576.*2097152"):
        check_topic(with_kafka(backbone_settings, record_limit_bytes=2 * 1024 * 1024))


def test_a_missing_topic_is_named(backbone_settings):
    with pytest.raises(TopicMissingError, match=r"no topic 'never\.made'"):
        check_topic(with_kafka(backbone_settings, topic="never.made"))


def test_a_topic_of_somebody_else_is_refused(backbone_settings):
    settings = with_kafka(backbone_settings, topic=backbone_settings.kafka.topic + ".foreign")
    kafka = settings.kafka
    admin = KafkaAdminClient(**client_options(kafka))
    try:
        config = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(kafka.record_limit_bytes)}
        made = {"num_partitions": 4, "replication_factor": 1, "configs": config}
        admin.create_topics({kafka.topic: made}, wait_for_metadata=True)
    finally:
        admin.close()
    with pytest.raises(TopicMissingError, match="first record is missing"):
        check_topic(settings)
    with Publisher(settings) as publisher:
        record = Topology(partitions=4, epoch=1).record(door="stack", principal="operator")
        foreign = type(record)(record.stream, "x", "cli", "operator", "job.event", b"{}")
        publisher.append(foreign).result(10)
    with pytest.raises(TopicMismatchError, match="does not begin with"):
        check_topic(settings)


def test_an_unreachable_kafka_is_an_error_within_a_bounded_time(backbone_settings):
    settings = with_kafka(backbone_settings, bootstrap_servers=f"127.0.0.1:{free_port()}")
    for call in (check_topic, ensure_topic, Publisher):
        begun = time.monotonic()
        with pytest.raises(BackboneUnreachable) as caught:
            call(settings)
        assert time.monotonic() - begun < 12
        assert caught.value.exit_code == 5


def made_by_an_attacker(settings):
    kafka = settings.kafka
    with admin_client(kafka) as admin:
        admin.create_topics([NewTopic(kafka.topic, 4, 1, topic_configs=topic_config(kafka))])
        admin.wait_for_topics([kafka.topic], timeout_ms=10_000)


def operator_without_mac(settings, name="mallory"):
    body = PrincipalAddition(principal=name, role=OPERATOR, token_sha256="0" * 64)
    append_raw(settings, [raw(body.record(door="cli", principal=OPERATOR))])


@pytest.mark.requirement("ST-04")
def test_a_topic_that_an_attacker_made_and_filled_first_is_refused_without_a_ledger(backbone_settings, keyring):
    settings = with_kafka(backbone_settings, topic=backbone_settings.kafka.topic + ".planted")
    made_by_an_attacker(settings)
    append_raw(settings, [raw(Topology(partitions=4, epoch=1).record(door="stack", principal="operator"))])
    operator_without_mac(settings)
    ensure_topic(settings)
    with pytest.raises(TopicMismatchError, match=r"records in front of its control\.macs_required"):
        check_first_records(settings)
    # As a log from before MACs, whose records the ledger has.
    settle_topic(settings, keyring)
    check_first_records(settings)


@pytest.mark.requirement("ST-04")
def test_a_topic_of_this_installation_is_accepted_until_other_master_keys_are_used(backbone_settings, tmp_path):
    check_first_records(backbone_settings)
    append_first_records(backbone_settings)
    operator_without_mac(backbone_settings)
    rotate(backbone_settings)
    check_first_records(backbone_settings)
    elsewhere = backbone_settings.model_copy(update={"data_dir": tmp_path / "elsewhere"})
    ensure_keyring(elsewhere)
    with pytest.raises(TopicMismatchError, match=r"in partition 0, 1, 2, 3;"):
        check_first_records(elsewhere)


@pytest.mark.requirement("ST-04")
def test_a_record_that_comes_between_the_topic_and_its_first_records_is_found(backbone_settings):
    settings = with_kafka(backbone_settings, topic=backbone_settings.kafka.topic + ".between")
    made_by_an_attacker(settings)
    check_first_records(settings)
    # `check_topic` looks at the partition of the topology alone.
    where = partition_for(TOPOLOGY_STREAM.encode(), 4)
    name = next(f"m{n}" for n in range(99) if partition_for(f"principal/m{n}".encode(), 4) != where)
    operator_without_mac(settings, name)
    append_first_records(settings)
    check_topic(settings)
    with pytest.raises(TopicMismatchError, match=r"in partition \d;"):
        check_first_records(settings)


@pytest.mark.requirement("OP-55")
def test_partitions_that_are_added_to_the_topic_change_nothing_and_doctor_warns(backbone_settings):
    settings = with_kafka(backbone_settings, topic=backbone_settings.kafka.topic + ".grown")
    ensure_topic(settings)
    with admin_client(settings.kafka) as admin:
        admin.create_partitions({settings.kafka.topic: NewPartitions(8)})
        wait_until(lambda: partition_count(admin, settings.kafka.topic) == 8, what="the new partitions")
    assert ensure_topic(settings) is False
    assert check_topic(settings) == 8
    assert topic_state(settings.kafka) is not None
    found = check_kafka(settings)
    assert (found.level, "Kafka has 8" in found.found) == ("warn", True), found
    for wrong in (8, 2):
        with pytest.raises(TopicMismatchError, match=rf"(kafka\.partitions is|partitions=)\s?{wrong}"):
            check_topic(with_kafka(settings, partitions=wrong))
