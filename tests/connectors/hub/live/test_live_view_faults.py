"""The live view while Kafka is killed, stopped and started again."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from unittest.mock import Mock

import psutil
import pytest
from kafka import KafkaAdminClient, TopicPartition

from connectors.hub.live.live_view import LiveView
from connectors.log import topic_consumer
from connectors.log.publisher import Publisher
from connectors.programs.local_stack import free_port
from schemas.log_access.kafka_clients import client_options
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.wire.record import Position
from tests.broker_processes import LOOPBACK, wait_until, with_kafka
from tests.connectors.hub.live.test_live_view import JOB, opened
from tests.jobs.topic_load import event, registration
from trunkline_agent.errors import BackboneUnreachable


@pytest.mark.requirement("CM-04")
def test_after_kafka_was_killed_and_is_back_the_live_view_goes_on_by_itself(
    backbone_settings, keyring, kafka_broker, monkeypatch
):
    process = psutil.Process()
    attempts = Mock(side_effect=topic_consumer.reach_kafka)
    monkeypatch.setattr(topic_consumer, "reach_kafka", attempts)
    with opened(backbone_settings, keyring) as view:
        with Publisher(backbone_settings) as publisher:
            publisher.append(registration(JOB, keyring)).result(10)
            before = publisher.append(event(JOB, 1)).result(10)
        assert view.wait_settled(before, 10).verdict == "accepted"
        coming = Position(before.partition, before.offset + 1)
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(view.wait_settled(coming, 60)))
        with kafka_broker.away():
            waiting.start()
            # Soon: not after the time that it is given.
            began = time.monotonic()
            with pytest.raises(BackboneUnreachable, match="does not answer at"):
                view.catch_up(60)
            assert time.monotonic() - began < 10
            assert view.failure is None
            # Each attempt to reach Kafka leaves nothing open.
            fewest, threads = process.num_fds(), process.num_threads()
            wait_until(lambda: attempts.call_count > 10, 30, "attempts to connect")
            assert process.num_fds() < fewest + 10
            assert process.num_threads() < threads + 5

        def appended():
            try:
                with Publisher(backbone_settings) as publisher:
                    return publisher.append(event(JOB, 2)).result(10)
            except BackboneUnreachable:
                return None

        assert wait_until(appended, 60, "Kafka takes records again") == coming
        waiting.join(60)
        (found,) = answers
        assert (found.verdict, found.seq) == ("accepted", 2)
        view.catch_up(20)
        assert view.row(REGISTRY_JOBS, JOB).events == 2


def test_a_kafka_that_hangs_for_a_while_costs_no_record(backbone_settings, keyring, kafka_broker):
    with opened(backbone_settings, keyring) as view, Publisher(backbone_settings) as publisher:
        publisher.append(registration(JOB, keyring)).result(10)
        with kafka_broker.standing_still():
            append = publisher.append(event(JOB, 1))
            with pytest.raises(BackboneUnreachable):
                view.catch_up(1.0)
        assert view.wait_settled(append.result(30), 30).seq == 1


def test_a_log_whose_records_are_gone_ends_the_live_view_with_the_reason(backbone_settings, keyring):
    kafka = backbone_settings.kafka
    with Publisher(backbone_settings) as publisher:
        publisher.append(registration(JOB, keyring)).result(10)
        last = publisher.append(event(JOB, 1)).result(10)
    admin = KafkaAdminClient(**client_options(kafka))
    with closing(admin):
        admin.delete_records({TopicPartition(kafka.topic, last.partition): last.offset})
    with (
        pytest.raises(BackboneUnreachable, match="the log does not have the offsets"),
        opened(backbone_settings, keyring),
    ):
        pass


def test_a_verdict_that_comes_while_one_looks_for_it_is_not_asked_of_the_ledger(
    backbone_settings, keyring, monkeypatch
):
    with opened(backbone_settings, keyring) as view, Publisher(backbone_settings) as publisher:
        first = publisher.append(registration(JOB, keyring)).result(10)
        assert view.wait_settled(first, 10).verdict == "accepted"
        coming = Position(first.partition, first.offset + 1)
        find = view.feed.find

        def find_too_early(position):
            found = find(position)
            publisher.append(event(JOB, 1)).result(10)
            view.wait_offset(coming, 10)
            return found

        monkeypatch.setattr(view.feed, "find", find_too_early)
        # There is no ledger here: whoever looks there waits in vain.
        assert view.wait_settled(coming, 5).verdict == "accepted"


def test_without_kafka_a_live_view_does_not_open(backbone_settings, keyring):
    nowhere = with_kafka(backbone_settings, bootstrap_servers=f"{LOOPBACK}:{free_port()}")
    view = LiveView(nowhere, keyring)
    with pytest.raises(BackboneUnreachable, match="Kafka does not answer"):
        view.open()
    view.close()


def test_a_kafka_that_is_there_and_gives_nothing_is_asked_less_and_less_often(
    backbone_settings, keyring, monkeypatch
):
    with opened(backbone_settings, keyring) as view:
        times: list[float] = []

        def refuse(*_):
            times.append(time.monotonic())
            raise BackboneUnreachable("refused for the test")

        with monkeypatch.context() as patched:
            patched.setattr(topic_consumer.LogTail, "poll", refuse)
            wait_until(lambda: len(times) > 5, what="the sixth")
        assert times[5] - times[0] > 2.4
        with Publisher(backbone_settings) as publisher:
            last = publisher.append(registration(JOB, keyring)).result(10)
        assert view.wait_settled(last, 20).verdict == "accepted"
