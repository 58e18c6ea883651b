"""Measure what a record costs late in a stream's life and early, by the settling task over a local store.

There is no Kafka and no Spark: the program calls the functions that Spark calls in a task. Each micro-batch is
committed to a ledger, and the local store follows it. A cost is that of a small micro-batch of one stream: the
processor time of the task from Spark's records to ledger rows in Arrow, and the bytes of these rows. Each is
settled three times, and the shortest time counts. The time that brings the store to the ledger's end does not
count. Early and late ones take turns.

- `job_…`: events 9,901 to 10,000 of a job, relative to its first 100.
- `drain_…`: the same for drains of a mailbox, each with the message that it takes.
- `pending_…`: a message, a drain and a lease in a mailbox with 10,000 or 100,000 waiting messages, relative to
  one with 100.

`bytes` and `cpu_us` are those of one record.

    ./trunkline bench long_lives --json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim, MailboxLease
from schemas.streams.mailboxes.message import Message
from schemas.tables.arrow_tables import ledger_batch
from schemas.wire.record import OutgoingRecord
from tests.benchmarks.bench_report import Bench, teller
from tests.jobs.topic_load import event, registration
from tests.micro_batches import MicroBatches, records_of
from tests.raw_records import raw

AT_MOST = {
    "job_bytes_ratio": 1.2,
    "job_cpu_ratio": 1.2,
    "drain_bytes_ratio": 1.2,
    "drain_cpu_ratio": 1.2,
    "pending_10000_cpu_ratio": 1.2,
    "pending_100000_cpu_ratio": 1.2,
}
WINDOW = 100
AT_ONCE = 5000
REPEATS = 3
JOB = "0badcafe"
BY: dict[str, Any] = {"door": "http", "principal": "ann"}

say = teller("long_lives")


class Life:
    """A stream in a ledger of its own, with a local store."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(data_dir=folder)
        self.keyring = ensure_keyring(settings)
        self._batches = MicroBatches(settings, self.keyring)
        self._offset = 0

    def live(self, records: Iterator[OutgoingRecord], count: int) -> None:
        """Settle and commit the next `count` records in few micro-batches."""
        while part := list(itertools.islice(records, min(count, AT_ONCE))):
            count -= len(part)
            self._batches.run(self._as_read(part))

    def measure(self, records: Iterator[OutgoingRecord], length: int) -> tuple[float, float]:
        """Settle and commit a micro-batch of `length` records. Return the bytes and the µs of all."""
        part = self._as_read(list(itertools.islice(records, length)))
        plan = self._batches.bring_forward()
        took = []
        for _ in range(REPEATS):
            began = time.process_time()
            rows = self._batches.settle(part, plan=plan)
            batch = ledger_batch(rows)
            took.append(time.process_time() - began)
        assert {row.verdict for row in rows} == {"accepted"}
        self._batches.commit(rows)
        return batch.nbytes, min(took) * 1e6

    def _as_read(self, part: list[OutgoingRecord]) -> Any:
        found = records_of(map(raw, part), first=self._offset)
        self._offset += len(found)
        return found


def posts(first: int) -> Iterator[OutgoingRecord]:
    """Messages to a mailbox."""
    for number in itertools.count(first):
        message = {"message_id": f"m{number}", "from": "ann", "to": "bo", "kind": "ask", "body": "{}"}
        yield Message.model_validate(message).record(**BY)


def drains() -> Iterator[OutgoingRecord]:
    """A message and a drain that takes it, again and again."""
    for number, message in enumerate(posts(0)):
        yield message
        yield MailboxClaim(to="bo", request_id=f"drain-{number}", limit=1).record(**BY)


def visits(first: int) -> Iterator[OutgoingRecord]:
    """A message, a drain of one and a lease of one, again and again."""
    for number, message in enumerate(posts(first)):
        yield message
        yield MailboxClaim(to="bo", request_id=f"drain-{number}", limit=1).record(**BY)
        yield MailboxLease(to="bo", request_id=f"lease-{number}", limit=1).record(**BY)


def in_turns(lives: dict[str, tuple[Life, Iterator[OutgoingRecord]]], length: int) -> dict[str, Any]:
    """Return the costs of one record of each life: medians of 100 micro-batches, which are settled in turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in lives}
    for _ in range(WINDOW):
        for name, (life, records) in lives.items():
            found[name].append(life.measure(records, length))
    return {
        name: {
            "bytes": round(sum(size for size, _ in costs) / WINDOW / length),
            "cpu_us": round(statistics.median(us for _, us in costs) / length, 1),
        }
        for name, costs in found.items()
    }


def ratios(name: str, early: dict[str, float], late: dict[str, float]) -> dict[str, float]:
    """The ratios of late to early."""
    return {
        f"{name}_bytes_ratio": round(late["bytes"] / early["bytes"], 3),
        f"{name}_cpu_ratio": round(late["cpu_us"] / early["cpu_us"], 3),
    }


def job(folder: Path) -> tuple[Life, Iterator[OutgoingRecord]]:
    """A registered job, and its events."""
    life = Life(folder)
    life.live(iter([registration(JOB, life.keyring)]), 1)
    return life, (event(JOB, seq) for seq in itertools.count(1))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures."""
    result: dict[str, Any] = {"age": args.age}
    for name, length, make in (
        ("job", 1, job),
        ("drain", 2, lambda place: (Life(place), drains())),
    ):
        lives = {when: make(folder / f"{name}-{when}") for when in ("early", "late")}
        life, records = lives["late"]
        life.live(records, (args.age - WINDOW) * length)
        result[name] = in_turns(lives, length)
        result |= ratios(name, result[name]["early"], result[name]["late"])
        say(f"{name}: {result[name]}")
    waiting = {}
    for count in args.pending:
        life = Life(folder / f"pending-{count}")
        life.live(posts(0), count)
        waiting[f"pending_{count}"] = (life, visits(count))
    costs = in_turns(waiting, 3)
    least, *others = costs
    for name in others:
        result |= ratios(name, costs[least], costs[name])
    return result | costs


def main() -> int:
    """Measure and print."""
    bench = Bench("long_lives", __doc__, AT_MOST)
    bench.add_argument("--age", type=int, default=10_000, help="the last record's number in its stream")
    bench.add_argument("--pending", type=int, nargs="+", default=[100, 10_000, 100_000])
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
