"""The order of the first records on a topic that Kafka is still making."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from kafka.admin import NewTopic

from connectors.log.publisher import Publisher
from schemas.log_access.event_topic import admin_client, topic_config
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import with_kafka

RECORD = OutgoingRecord("job/0a1b2c3d", "id-1", "mqtt", "unverified", "job.event", b"{}", partition=0)
# With five requests at a time about one topic in forty was hit, so two runs of three would find it.
TOPICS = 48
WITHIN_S = 20.0
FOR_S = 0.15


def positions_on_a_new_topic(settings: Settings) -> list[int]:
    """Append to one partition for a moment, from the moment on at which Kafka knows of the topic."""
    fresh = with_kafka(settings, topic=f"fresh.{uuid.uuid4().hex[:12]}")
    kafka = fresh.kafka
    topic = NewTopic(kafka.topic, kafka.partitions, 1, topic_configs=topic_config(kafka))

    def make() -> None:
        with admin_client(kafka) as admin:
            time.sleep(0.1)
            admin.create_topics([topic])

    maker = threading.Thread(target=make)
    maker.start()
    with closing(Publisher(fresh)) as publisher:
        until, appends = time.monotonic() + FOR_S, []
        while time.monotonic() < until:
            appends.append(publisher.append(RECORD))
            time.sleep(0.001)
        found = [append.result(WITHIN_S).offset for append in appends]
    maker.join()
    return found


@pytest.mark.requirement("CM-08")
def test_no_record_overtakes_the_first_one_on_a_topic_that_kafka_is_still_making(
    backbone_settings: Settings,
) -> None:
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(positions_on_a_new_topic, [backbone_settings] * TOPICS):
            assert found == list(range(len(found)))
