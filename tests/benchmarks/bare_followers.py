"""The controls of bridge and gateway in `bench freshness`: as little as a program can do in their places.

`forwarder` subscribes to the events over MQTT and appends each to a Kafka topic of its own, which is no more
than paho and librdkafka cost. `consumer` reads each record of the log. Neither checks, folds or answers. They
run beside the stack under the same load.

The one argument is the name of the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from connectors.log.kafka_libraries import client_options, producer_options
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from connectors.programs.local_stack.program_plans import READY_FILE
from schemas.settings.settings import Settings, load_settings
from tests.benchmarks.pump_log import LINGER_MS, make_topic
from trunkline_agent.mqtt.mqtt_client import connect_properties, dial, new_client
from trunkline_agent.wire.topics import events_filter

_BATCH, _STEP_S = 500, 0.05


def forwarder(settings: Settings) -> Callable[[], object]:
    """Subscribe and forward; return the step that the program repeats."""
    topic, mqtt = f"{settings.kafka.topic}.forwarded", role_mqtt(settings, OPERATOR)
    make_topic(settings.kafka, topic)
    producer = Producer(producer_options(settings.kafka, linger_ms=LINGER_MS))
    client = new_client(mqtt)

    def on_message(_client: Any, _data: Any, message: Any) -> None:
        producer.produce(topic, message.payload, message.topic.encode())

    def on_connect(*_: Any) -> None:
        client.subscribe(events_filter(mqtt.topic_prefix), qos=1)

    client.on_connect = on_connect
    client.on_subscribe = lambda *_: Path(os.environ[READY_FILE]).touch()
    client.on_message = on_message
    dial(client, mqtt, connect_properties())
    return lambda: producer.poll(1.0)


def consumer(settings: Settings) -> Callable[[], object]:
    """Open a consumer at the end of the log; return the step that the program repeats."""
    kafka = settings.kafka
    options = {**client_options(kafka), "group.id": "bare", "enable.auto.commit": False}
    reader = Consumer(options)
    places = [TopicPartition(kafka.topic, number) for number in range(kafka.partitions)]
    for place in places:
        place.offset = reader.get_watermark_offsets(place)[1]
    reader.assign(places)
    Path(os.environ[READY_FILE]).touch()
    return lambda: reader.consume(_BATCH, _STEP_S)


def main(name: str) -> None:
    """Run one of the programs until SIGTERM."""
    step = {"forwarder": forwarder, "consumer": consumer}[name](load_settings())
    while True:
        step()


if __name__ == "__main__":
    main(sys.argv[1])
