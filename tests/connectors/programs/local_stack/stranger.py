"""Tries as uid 65534 to use the stack's Kafka without its login. Prints a JSON list of all that worked.

Started as root, because only root can become another user.
`python -m tests.connectors.programs.local_stack.stranger TOPIC DATA_DIR PORT...`, the clients' port first.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.log_access.kafka_clients import SILENT

NOBODY = 65534
_ANSWER_S = 5.0
_LOGINS: tuple[dict[str, str], ...] = (
    {"security.protocol": "PLAINTEXT"},
    *(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": user,
        }
        for mechanism, user in (("SCRAM-SHA-512", "trunkline"), ("PLAIN", "broker"))
    ),
)


def become_nobody() -> None:
    """Give up all rights of root, for good. Started by another user than root it stays that user."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def with_kafka(login: dict[str, str], topic: str) -> Iterator[str]:
    """Yield what can be done with this login. Raises KafkaException at the first refusal."""
    options = {**login, "logger": SILENT}
    admin = AdminClient(options)
    if topic in admin.list_topics(timeout=_ANSWER_S).topics:
        yield "listed"
    consumer = Consumer({**options, "group.id": "stranger", "auto.offset.reset": "earliest"})
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(2)])
        found = consumer.poll(_ANSWER_S)
        if found is not None and found.error() is None:
            yield "read"
    finally:
        consumer.close()
    producer = Producer(options)
    acknowledged: list[bool] = []
    producer.produce(topic, b"forged", on_delivery=lambda error, _: acknowledged.append(error is None))
    producer.flush(_ANSWER_S)
    if acknowledged == [True]:
        yield "appended"
    admin.delete_topics([topic])[topic].result(_ANSWER_S)
    yield "deleted"


def readable(folder: Path) -> Iterator[str]:
    """Yield which files with passwords can be read."""
    for name in ("keys/kafka.password", "kafka/server.properties"):
        try:
            (folder / name).read_bytes()
        except OSError:
            continue
        yield f"read {name}"


def worked_with(topic: str, port: str, login: dict[str, str]) -> list[str]:
    """Return what one login could do at one listener."""
    worked = []
    try:
        for done in with_kafka({"bootstrap.servers": f"127.0.0.1:{port}", **login}, topic):
            worked.append(f"{done} at {port} by {login['security.protocol']}")
    except KafkaException:
        pass
    return worked


def main(topic: str, folder: str, ports: list[str]) -> None:
    """Try the files, then each listener with each login, all at once."""
    become_nobody()
    tries = list(itertools.product(ports, _LOGINS))
    with ThreadPoolExecutor(len(tries)) as pool:
        worked = pool.map(lambda one: worked_with(topic, *one), tries)
        print(json.dumps([*readable(Path(folder)), *itertools.chain.from_iterable(worked)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
