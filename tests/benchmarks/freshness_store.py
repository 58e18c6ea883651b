"""How old an event is in the ledger when its tables are in an object store, relative to those on local disk.

The streaming jobs take turns with two sets of tables, under the same load, with all other parts up: one on
disk, one on an S3 server that runs on this machine, as a process of its own. The moment of a commit is when a
reader that looks every 20 ms first sees it, in both places. The server takes its processor time from the
others, so the ratio is worse than with a store elsewhere that is as near.

    ./trunkline bench freshness_store --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow.parquet as parquet
from deltalake import DeltaTable

from connectors.programs.local_stack import LocalStack, Part
from connectors.programs.local_stack.part_plan import STREAMS
from connectors.programs.local_stack.stack import PLANS
from schemas.integrity.audit_chain import has_commit
from schemas.settings.settings import Settings, StorageSettings
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger import LEDGER
from tests.benchmarks.bench_report import Bench, quantile, teller
from tests.benchmarks.freshness import RATE, Loads, settings_in, wait_caught_up
from tests.benchmarks.freshness_moments import Sent, ages, within
from tests.s3_server import s3_server

AT_MOST = {"ratio_store_p50": 1.5}
LOOK_S = 0.02

say = teller("freshness_store")


class CommitTimes(threading.Thread):
    """Notes when each new commit of a ledger is first there for a reader, as a context manager."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(daemon=True)
        path = settings.table_path(LEDGER)
        self._storage = table_storage(path)
        self._version = DeltaTable(path).version()
        self._ending = threading.Event()
        self._seen: dict[int, float] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self.join()

    def run(self) -> None:
        """Look every 20 ms until the context ends."""
        while not self._ending.wait(LOOK_S):
            while has_commit(self._storage, self._version + 1):
                self._version += 1
                self._seen[self._version] = time.time()

    def moments(self) -> Sent:
        """When each event of the commits was there."""
        found: Sent = {}
        for version, moment in self._seen.items():
            with self._storage.open_input_stream(f"_delta_log/{version:020d}.json") as stream:
                actions = [json.loads(line) for line in stream.read().splitlines()]
            for path in (one["add"]["path"] for one in actions if "add" in one and one["add"]["dataChange"]):
                rows = parquet.read_table(path, columns=["ce_id"], filesystem=self._storage, partitioning=None)
                found |= dict.fromkeys(rows["ce_id"].to_pylist(), moment)
        return found


def measured(at: Settings, part: Part, loads: Loads, warm_s: int, seconds: int) -> list[float]:
    """Return how old each event was in the ledger of the settings `at`, in seconds, sorted."""
    part.start()
    loads.run(warm_s)
    wait_caught_up(at)
    with CommitTimes(at) as seen:
        turn = loads.run(seconds)
        wait_caught_up(at)
    part.stop()
    return ages(within(turn.sent, *turn.window), seen.moments(), f"ledger at {at.tables_root}")


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure both sets of tables in turns."""
    settings = settings_in(work / "data", None)
    found: dict[str, list[list[float]]] = {"disk": [], "store": []}
    with s3_server(work) as server:
        store = server.with_bucket()
        os.environ.update(store.environment)
        tables = StorageSettings(tables=f"s3://{store.bucket}/tables", state=settings.data_path / "far_state")
        far = settings.model_copy(update={"storage": tables})
        with LocalStack(settings) as stack:
            loads = Loads(settings, args.rate)
            places = {"disk": (settings, stack[STREAMS]), "store": (far, Part(PLANS[STREAMS](far), far))}
            for number in range(1, args.rounds + 1):
                for name, (at, part) in places.items():
                    say(f"round {number} of {args.rounds}: {name}")
                    found[name].append(measured(at, part, loads, args.warm, args.seconds))
    (disk, disk_p95), (there, there_p95) = (
        [statistics.median(quantile(one, share) for one in rounds) for share in (0.5, 0.95)]
        for rounds in found.values()
    )
    return {
        "disk_p50_s": round(disk, 3),
        "disk_p95_s": round(disk_p95, 3),
        "store_p50_s": round(there, 3),
        "store_p95_s": round(there_p95, 3),
        "ratio_store_p50": round(there / disk, 3),
        "ratio_store_p95": round(there_p95 / disk_p95, 3),
        "rounds": [
            {
                name: [round(quantile(rounds[number], share), 3) for share in (0.5, 0.95)]
                for name, rounds in found.items()
            }
            for number in range(args.rounds)
        ],
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("freshness_store", __doc__, AT_MOST)
    bench.add_argument("--rate", type=int, default=RATE, help=f"events a second (default {RATE})")
    bench.add_argument("--seconds", type=int, default=40, help="length of the measured load (default 40)")
    bench.add_argument("--warm", type=int, default=60, help="length of the load before it (default 60)")
    bench.add_argument("--rounds", type=int, default=2, help="turns of disk and store (default 2)")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
