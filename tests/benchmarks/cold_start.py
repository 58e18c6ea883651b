"""How long a live view takes to load the view tables of many jobs, and how much memory it then holds.

Writes the tables of JOBS finished and running jobs, loads them in a process of its own, without Kafka.

    ./trunkline bench cold_start --jobs 100000 --json
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
from deltalake import write_deltalake

from schemas.entries import Entries
from schemas.fold import settle
from schemas.job_registry import registration_record
from schemas.record import JOB_EVENT, OutgoingRecord, Record, content_id
from schemas.sealing import Keyring
from schemas.settings import PROJECT_ROOT, Settings
from schemas.settled import FOLD_VERSION
from schemas.signing import sign_event
from schemas.strict_json import canonical
from schemas.view_arrow import VIEW_ARROW
from schemas.view_progress import ViewProgress
from schemas.view_rows import REGISTRY_JOBS
from schemas.views import STREAM_ENTRIES

_SHELF = 4096
_KINDS = ("started", *["progress"] * 8, "completed")
_SECRET = "a-secret"
_KEYRING = Keyring({"bench": b"k" * 32}, "bench")


def _records(job: str, events: int) -> list[OutgoingRecord]:
    records = [registration_record(job, _SECRET, f"benchmark job {job}: read, change, test", _KEYRING)]
    for seq in range(1, events + 1):
        body = {
            "schema_version": 1,
            "seq": seq,
            "job_id": job,
            "event": _KINDS[seq - 1],
            "timestamp": "2026-11-21T10:00:00Z",
            "detail": f"{seq}/{events} of {job}",
            "data": {},
        }
        value = canonical(sign_event(body, _SECRET))
        ce_id = content_id(job.encode(), value)
        records.append(OutgoingRecord(f"job/{job}", ce_id, "mqtt", "unverified", JOB_EVENT, value))
    return records


def _folded(job: str, events: int, offset: int) -> tuple[list[tuple[object, ...]], tuple[object, ...], int]:
    """Rows of `stream_entries` and the row of `registry_jobs` of one job, and the next offset."""
    entries, row = Entries(), None
    for outgoing in _records(job, events):
        names, values = zip(*outgoing.headers(), strict=True)
        moment = 1_790_000_000_000_000 + offset * 1000
        record = Record("bench", 0, offset, moment, outgoing.key, outgoing.value, names, values)
        row = settle(record, entries, _KEYRING).changes[0].row
        offset += 1
    stored = [("job", job, key, value, FOLD_VERSION, 0, offset - 1) for key, value in entries.stored().items()]
    return stored, (*(getattr(row, name) for name in row.__struct_fields__), 0, offset - 1), offset


def _write(settings: Settings, table: str, rows: list[tuple[object, ...]], offset: int) -> None:
    schema = VIEW_ARROW[table]
    columns = zip(*rows, strict=True)
    arrays = [
        pa.array(column, pa.int64()).cast(field.type) if pa.types.is_timestamp(field.type)
        else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]  # fmt: skip
    whole = pa.Table.from_arrays(arrays, schema=schema)
    shelves = pa.array([number // _SHELF for number in range(len(rows))], pa.int32())
    write_deltalake(
        settings.table_path(table),
        whole.append_column("shelf", shelves),
        partition_by=["shelf"],
        commit_properties=ViewProgress({0: offset}, 0).commit_properties(),
    )


def write_tables(settings: Settings, jobs: int) -> None:
    """The tables of `jobs` jobs: nine of ten have ended after ten events, one runs."""
    offset, entries, rows = 0, [], []
    for number in range(jobs):
        found, row, offset = _folded(secrets.token_hex(4), 10 if number % 10 else 3, offset)
        entries += found
        rows.append(row)
    _write(settings, REGISTRY_JOBS, rows, offset)
    _write(settings, STREAM_ENTRIES, entries, offset)


def load_once(folder: str) -> dict[str, float | int]:
    """Load the tables below `folder` as the live view does, in this process."""
    from connectors.live_view import LiveView

    process = psutil.Process()
    before = process.memory_info().rss
    began = time.monotonic()
    view = LiveView(Settings(data_dir=Path(folder)), _KEYRING)
    view.load()
    seconds = time.monotonic() - began
    rss = process.memory_info().rss
    return {
        "jobs": len(view.rows(REGISTRY_JOBS)),
        "streams": len(view.streams()),
        "load_s": round(seconds, 2),
        "rss_mb": round(rss / 1e6),
        "loaded_mb": round((rss - before) / 1e6),
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    parser = argparse.ArgumentParser(prog="trunkline bench cold_start", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000, metavar="N", help="jobs in the tables (100,000)")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--load", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load_once(args.load)))
        return 0
    with tempfile.TemporaryDirectory(prefix="trunkline-cold-start-") as work:
        write_tables(Settings(data_dir=Path(work)), args.jobs)
        command = [sys.executable, "-m", "tests.benchmarks.cold_start", "--load", work]
        done = subprocess.run(command, cwd=PROJECT_ROOT, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout)
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
