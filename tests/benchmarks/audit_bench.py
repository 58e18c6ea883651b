"""The cost of the tamper evidence: the hash of each row while it is settled, and a whole `audit verify`.

Makes a ledger of N rows out of events that the fold has settled, with real roots, chain and anchor, in commits
of so many rows as a micro-batch has; then verifies it as `./trunkline audit verify` does, in a process of its
own. `--compact` lets maintenance put its files together first. A limit that
was not held is in `not_held`, and the exit code is 1.

    ./trunkline bench audit --rows 1000000 --json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import Row

from jobs.ledger.audit_trail import AuditTrail
from jobs.ledger.ledger_files import FileRoots, write_file
from jobs.ledger.ledger_table import prepare_ledger
from jobs.maintain_tables import tidy_ledger
from jobs.settling.fold_run import settle_run
from jobs.settling.ledger_sink import LedgerSink
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring
from schemas.settings.settings import PROJECT_ROOT, Settings, settings_environment
from schemas.tables.ledger import LEDGER, LedgerRow
from schemas.tables.ledger_arrow import LEDGER_ARROW, ledger_batch
from tests.benchmarks.bench_report import Bench
from tests.jobs.topic_load import event, registration
from tests.schemas.stream_records import as_read

AT_MOST = {"verify_s": 60}

PARTITIONS, JOBS = 4, 50
TEMPLATE_ROWS, SETTLED_AT_ONCE = 5_000, 500


def template(keyring: Keyring) -> pa.RecordBatch:
    """Settled events of some jobs in turn, as one partition's share of a micro-batch."""
    jobs = [f"{number:08x}" for number in range(JOBS)]
    outgoing = [registration(job, keyring) for job in jobs]
    for seq in range(1, TEMPLATE_ROWS // JOBS):
        outgoing += [event(job, seq, "started" if seq == 1 else "progress", f"step {seq}") for job in jobs]
    records = [as_read(sent, offset, partition=0) for offset, sent in enumerate(outgoing)]
    entries: dict[bytes | None, Entries] = {record.key: Entries() for record in records}
    settled: list[LedgerRow] = []
    for start in range(0, len(records), SETTLED_AT_ONCE):
        settled += settle_run(records[start : start + SETTLED_AT_ONCE], entries.__getitem__, keyring)
    return ledger_batch(settled)


def placed(rows: pa.RecordBatch, partition: int, first: int, count: int) -> pa.RecordBatch:
    """So many of the rows, at other offsets and with ids of their own."""
    part = rows.slice(first % (rows.num_rows - count + 1), count)
    columns = {name: part.column(name) for name in rows.schema.names}
    columns["partition"] = pa.array(np.full(count, partition, dtype=np.int32))
    columns["offset"] = pa.array(np.arange(first, first + count, dtype=np.int64))
    columns["ce_id"] = pa.array([os.urandom(32).hex() for _ in range(count)])
    return pa.RecordBatch.from_pydict(columns, schema=LEDGER_ARROW)


def fill(settings: Settings, rows: pa.RecordBatch, wanted: int, commit_rows: int) -> int:
    """Make the ledger; returns how many commits it has."""
    prepare_ledger(settings)
    path, trail = settings.table_path(LEDGER), AuditTrail(settings)
    sink = LedgerSink(settings)
    sink.started("bench")
    share, first, commits = commit_rows // PARTITIONS, 0, 0
    while first * PARTITIONS < wanted:
        count = min(share, wanted // PARTITIONS - first)
        files = []
        for task in range(2):
            batches = [placed(rows, p, first, count) for p in range(task, PARTITIONS, 2)]
            files += [Row(**file) for written in write_file(path, batches) for file in written.to_pylist()]
        sink.commit(files, commits)
        first, commits = first + count, commits + 1
        if commits % 100 == 0:
            trail.follow()
            DeltaTable(path).create_checkpoint()
    trail.follow()
    trail.anchor(at_once=True)
    return commits


def hash_costs(rows: pa.RecordBatch) -> dict[str, float]:
    """Processor microseconds a row for leaves, tree and marks, in runs of several lengths; the best of five."""
    found = {}
    for length in (100, 1_000, rows.num_rows):
        best, repeats = float("inf"), max(1, 5_000 // length)
        for _ in range(5):
            began = time.process_time()
            for _ in range(repeats):
                roots = FileRoots()
                roots.add(rows.slice(0, length))
                roots.to_json()
            best = min(best, (time.process_time() - began) / repeats / length)
        found[f"{length}_rows_us"] = round(best * 1e6, 2)
    return found


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures."""
    settings = Settings(data_dir=folder)
    rows = template(Keyring({"bench": b"k" * 32}, "bench"))
    costs = hash_costs(rows)
    began = time.monotonic()
    commits = fill(settings, rows, args.rows, args.commit_rows)
    filled_s = time.monotonic() - began
    if args.compact:
        tidy_ledger(settings, 0)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "connectors.cli", "audit", "verify", "--json"],
        env=os.environ | settings_environment(settings) | {"PYTHONPATH": str(PROJECT_ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    took_s = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(done.stdout)
    assert report["true"] and report["rows"] == args.rows and report["rows_not_anchored"] == 0, report
    files = list(Path(settings.table_path(LEDGER)).glob("*.parquet"))
    (chain,) = (folder / "audit").iterdir()
    return {
        "rows": report["rows"],
        "commits": commits,
        "files": len(files),
        "ledger_bytes": sum(file.stat().st_size for file in files),
        "chain_bytes_per_commit": round(chain.stat().st_size / commits),
        "hash_us_per_row": costs,
        "fill_s": round(filled_s, 1),
        "verify_s": round(took_s, 2),
        "verify_cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "verify_peak_mb": round(used.ru_maxrss / 1024),
    }


def main() -> int:
    """Measure and print."""
    bench = Bench("audit", __doc__, AT_MOST)
    bench.add_argument("--rows", type=int, default=1_000_000)
    bench.add_argument("--commit-rows", type=int, default=2_000, help="rows of a micro-batch")
    bench.add_argument("--compact", action="store_true", help="after maintenance")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
