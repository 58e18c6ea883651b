"""The disk of the log itself is full: Kafka ends, and what was acknowledged is there when it is back."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from connectors.log.publisher import Publisher
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import BrokerProcess, make_kafka, wait_until
from tests.own_settings import own_settings
from trunkline_agent.errors import BackboneUnreachable

pytestmark = pytest.mark.kafka

STREAM = "job/0a1b2c3d"
READ_S = 30.0


def record(number: int) -> OutgoingRecord:
    return OutgoingRecord(STREAM, f"id-{number}", "mqtt", "unverified", "job.event", b"%d" % number)


def logged(settings: Settings) -> list[int]:
    """The numbers of the stream's records, in the log's order."""
    found: list[int] = []
    deadline = time.monotonic() + READ_S
    with topic_reader(settings.kafka) as consumer:
        while time.monotonic() < deadline:
            for batch in consumer.poll(timeout_ms=200).values():
                found += [int(one.value) for one in batch if one.key == STREAM.encode()]
            ends = consumer.end_offsets(sorted(consumer.assignment()))
            if all(consumer.position(partition) >= end for partition, end in ends.items()):
                return found
    pytest.fail(f"the log's end was not reached within {READ_S} s")


@pytest.mark.slow
@pytest.mark.requirement("CM-03")
@pytest.mark.timeout(240)
def test_when_kafkas_disk_was_full_all_that_was_acknowledged_is_there_in_its_order(
    mosquitto_broker: BrokerProcess, tmp_path: Path
) -> None:
    kafka = make_kafka(tmp_path / "kafka")
    kafka.start()
    try:
        settings = own_settings(kafka, mosquitto_broker, tmp_path)
        with Publisher(settings) as publisher:
            for number in range(50):
                publisher.append(record(number)).result(20)
            assert kafka.process is not None
            _, hard = resource.prlimit(kafka.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(kafka.process.pid, resource.RLIMIT_FSIZE, (0, hard))
            with pytest.raises(BackboneUnreachable):
                publisher.append(record(50)).result(60)
            # With one folder for its log Kafka does not go on without it.
            wait_until(lambda: kafka.process is None or kafka.process.poll() is not None, 60, "Kafka has ended")
        kafka.stop()
        kafka.start()
        with Publisher(settings) as publisher:
            for number in range(51, 100):
                publisher.append(record(number)).result(20)
        found = logged(settings)
    finally:
        kafka.kill()
    # Of the one that was not acknowledged nothing is promised.
    assert [number for number in found if number != 50] == [*range(50), *range(51, 100)]
