"""The peer of `bench drain`: one Python process, confluent-kafka in, the same fold, deltalake out.

It settles with the same code and writes the same columns, a commit a second. Its state is a dict: what it
knows is lost with the process, and its commits do not say how far they go. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
import uuid

from confluent_kafka import Consumer
from deltalake import write_deltalake

from connectors.log.kafka_libraries import message_record
from jobs.settling.fold_run import settle_run
from schemas.fold.entries import Entries
from schemas.keys.sealing import load_keyring
from schemas.log_access.kafka_clients import librdkafka_options
from schemas.settings.settings import load_settings
from schemas.tables.arrow_tables import LEDGER_ARROW, ledger_batch
from schemas.tables.ledger import LedgerRow

COMMIT_EVERY_S = 1.0
SILENCE_S = 20.0


class StreamEntries(dict[bytes | None, Entries]):
    """The entries of every key seen so far."""

    def __missing__(self, key: bytes | None) -> Entries:
        found = self[key] = Entries()
        return found


def main(path: str, expected: int) -> None:
    """Drain the topic into the table at `path` until `expected` rows are in it."""
    settings = load_settings()
    keyring = load_keyring(settings)
    consumer = Consumer(
        {
            **librdkafka_options(settings.kafka),
            "group.id": f"peer-{uuid.uuid4()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([settings.kafka.topic])
    entries = StreamEntries()
    pending: list[LedgerRow] = []
    settled = written = 0
    began: float | None = None
    committed = last_message = time.monotonic()
    while written < expected:
        messages = consumer.consume(10_000, 0.1)
        if began is None:
            began = time.monotonic() if messages else None
        if messages:
            last_message = time.monotonic()
            received = [message_record(m) for m in messages if not m.error()]
            pending.extend(settle_run(received, entries.__getitem__, keyring))
        elif time.monotonic() - last_message > SILENCE_S:
            raise RuntimeError(f"Kafka fell silent after {written + len(pending)} of {expected} records")
        settled = written + len(pending)
        if pending and (time.monotonic() - committed >= COMMIT_EVERY_S or settled >= expected):
            write_deltalake(path, ledger_batch(pending), mode="append")
            written, pending, committed = settled, [], time.monotonic()
    consumer.close()
    seconds = time.monotonic() - (began or committed)
    figures = {"rows": written, "seconds": seconds, "columns": len(LEDGER_ARROW), "cpu_s": time.process_time()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
