"""A stranger with a stolen Kafka login, who appends well-formed records of every type past all doors.

The stranger has no key of any door. Each of these records must be rejected, and change nothing. Job events and
outbox messages of agents are left out: they carry a signature of their sender, which `forge` attacks. Copies of
the newest records have the MACs and signatures of the first ones, and must count as the repeats that they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import confluent_kafka
from kafka.errors import KafkaError

from schemas.keys.record_macs import SIGNED_BY_AUTHOR
from schemas.log_access.kafka_clients import librdkafka_options
from schemas.settings.settings import KafkaSettings, Settings
from schemas.wire.record import OutgoingRecord
from tests.faults.prove.oracle import FOREIGN, Note, Oracle
from tests.raw_records import append_raw, raw, read_to_end
from tests.schemas.stream_records import GOOD
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.strict_json import canonical

_COPIES: Final = 100
_ATTEMPTS: Final = 3
_PAUSE_S: Final = 5.0
# As the doors write it.
_SOURCE: Final = ("http", "operator")


def foreign_records(targets: Mapping[str, str], nonce: str) -> list[OutgoingRecord]:
    """Return a record of each type that a door authenticates.

    Args:
        targets: For a kind of stream, the name of a stream that exists, such as `default/hanna` for `mailbox`.
            Records of other kinds are about streams of their own.
        nonce: A text that makes the CloudEvents ids unlike those of other calls.
    """
    found = []
    for record_type, (key, body) in GOOD.items():
        if record_type in SIGNED_BY_AUTHOR:
            continue
        kind, _, name = key.decode().partition("/")
        target = targets.get(kind, name)
        own, new = (text.rpartition("/")[2] for text in (name, target))
        value = canonical({field: new if said == own else said for field, said in body.items()})
        ce_id = f"foreign-{nonce}-{record_type}"
        found.append(OutgoingRecord(f"{kind}/{target}", ce_id, *_SOURCE, record_type, value))
    return found


def write_foreign(settings: Settings, targets: Mapping[str, str], nonce: str, oracle: Oracle) -> int:
    """Append the records to Kafka, note each for the comparison, and return how many there are."""
    records = foreign_records(targets, nonce)
    append_raw(settings, [raw(one) for one in records])
    for one in records:
        oracle.note(Note(FOREIGN, "kafka", one.stream, one.ce_id, "stranger"))
    return len(records)


def write_copies(kafka: KafkaSettings) -> int:
    """Append the newest records of the log again, byte for byte, each to its partition. Return how many."""
    newest = sorted(read_to_end(kafka), key=lambda record: int(record.timestamp))[-_COPIES:]
    producer = confluent_kafka.Producer(librdkafka_options(kafka))
    for one in newest:
        producer.produce(kafka.topic, one.value, one.key, one.partition, headers=list(one.headers))
    assert producer.flush(30) == 0
    return len(newest)


def write_despite_faults(settings: Settings, oracle: Oracle) -> Exception | None:
    """Write records and copies, if need be again, because another fault may keep Kafka away for some seconds.

    Returns None, or why the last attempt failed.
    """
    trouble: Exception | None = None
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        try:
            write_foreign(settings, targets_of(oracle), str(attempt), oracle)
            write_copies(settings.kafka)
            return None
        except (BackboneUnreachable, KafkaError, confluent_kafka.KafkaException, AssertionError) as error:
            trouble = error
    return trouble


def targets_of(oracle: Oracle) -> dict[str, str]:
    """Return streams that the load has used: a job, a mailbox, and a task if there is one."""
    keys = (note.stream.partition("/") for note in oracle.notes())
    return {kind: name for kind, _, name in keys if name}
