"""Where the log ends, asked of a real broker that is there, stands still, or has no such topic yet."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from unittest.mock import Mock

import psutil
import pytest
from kafka.admin import NewTopic

from connectors.log import log_end
from connectors.log.log_end import LogEnd
from connectors.log.publisher import Publisher
from schemas.log_access.event_topic import admin_client
from tests.broker_processes import wait_until, with_kafka
from tests.jobs.topic_load import event
from trunkline_agent.errors import BackboneUnreachable

JOB = "0a1b2c3d"


def test_it_is_where_the_next_record_will_be_in_each_partition(backbone_settings):
    with closing(LogEnd(backbone_settings.kafka)) as end, Publisher(backbone_settings) as publisher:
        before = end.offsets(10)
        position = publisher.append(event(JOB, 1)).result(10)
        assert len(before) == backbone_settings.kafka.partitions
        assert before[position.partition] == position.offset
        assert end.offsets(10) == before | {position.partition: position.offset + 1}


def test_a_partition_that_has_no_leader_yet_is_asked_for_again(backbone_settings, monkeypatch):
    kafka = with_kafka(backbone_settings, topic=f"{backbone_settings.kafka.topic}.later", partitions=2).kafka
    attempts = Mock(side_effect=log_end.reach_kafka)
    monkeypatch.setattr(log_end, "reach_kafka", attempts)
    found: list[dict[int, int]] = []
    with closing(LogEnd(kafka)) as end:
        asking = threading.Thread(target=lambda: found.append(end.offsets(30)))
        asking.start()
        wait_until(lambda: attempts.call_count > 2, 30, "some attempts")
        with admin_client(kafka) as admin:
            admin.create_topics([NewTopic(kafka.topic, 2, 1)])
        asking.join(30)
    assert found == [{0: 0, 1: 0}]


def test_without_the_topic_it_says_so_in_time(backbone_settings):
    kafka = with_kafka(backbone_settings, topic="nowhere").kafka
    began = time.monotonic()
    with (
        closing(LogEnd(kafka)) as end,
        pytest.raises(BackboneUnreachable, match=r"topic 'nowhere': .*partition"),
    ):
        end.offsets(1.0)
    assert time.monotonic() - began < 10


def test_after_kafka_was_started_anew_it_is_asked_by_what_its_leaders_are_now(backbone_settings, kafka_broker):
    with closing(LogEnd(backbone_settings.kafka)) as end:
        there = end.offsets(10)
        kafka_broker.stop()
        kafka_broker.start()
        assert end.offsets(30) == there


@pytest.mark.requirement("HH-12")
def test_while_kafka_stands_still_it_ends_in_time_and_answers_afterwards(backbone_settings, kafka_broker):
    process = psutil.Process()
    with closing(LogEnd(backbone_settings.kafka)) as end:
        there = end.offsets(10)
        threads = process.num_threads()
        with kafka_broker.standing_still():
            began = time.monotonic()
            for timeout_s in (0.5, 3.0):  # also when it looks whether anybody is there
                with pytest.raises(BackboneUnreachable, match="did not say within"):
                    end.offsets(timeout_s)
            # The client counts in milliseconds.
            assert 3.49 <= time.monotonic() - began < 5.0
        assert end.offsets(20) == there
        wait_until(lambda: process.num_threads() <= threads, 20, "the end of what the clients before left")
