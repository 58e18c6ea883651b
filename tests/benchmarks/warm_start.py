"""How much faster the live view starts on its local store than on the tables, and what ended jobs cost it.

Writes the view tables of two lives: ENDED ended jobs and LIVE running ones, and the running ones alone. The
jobs are copies of two, under other ids. Each life is loaded as the gateway loads it, without Kafka, first from
the tables, which makes the local store, and then from the store. Each load is a process of its own, and the
starts from the store are repeated: the median counts.

The ratios do not depend much on the machine: `start_ratio` is the CPU time of a start from the store to that of
one from the tables, with ended jobs. `memory_ratio` is the resident memory after a start from the store, with
ended jobs to that without.

    ./trunkline bench warm_start --ended 1000000 --live 10000 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from deltalake import write_deltalake

from connectors.hub.live.live_view import LiveView
from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.fold.stream_kind import COMPLETED
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.fold import STREAM_ENTRIES, settle
from schemas.streams.job.job_registry import REGISTRY_JOBS, JobRegistration, JobRow
from schemas.tables.arrow_tables import VIEW_ARROW
from schemas.tables.view_progress import NO_PROGRESS, ViewProgress
from tests.benchmarks.bench_report import Bench, teller
from tests.jobs.topic_load import raw_event
from tests.schemas.job_records import signed
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.strict_json import canonical

TableRow = tuple[object, ...]

_KEYRING = Keyring({"bench": b"k" * 32}, "bench")
_SECRET = "a-secret"
_JOB = "0a1b2c3d"
_KINDS = ("started", *["progress"] * 8, "completed")
_JOBS_AT_ONCE = 50_000
_STARTS = 3
# The first fields of a row of either table that name the job.
_NAMED_BY = {STREAM_ENTRIES: 1, REGISTRY_JOBS: 0}
say = teller("warm_start")


def _folded(events: int) -> tuple[Sequence[TableRow], TableRow]:
    """Return the rows of `stream_entries` and the row of `registry_jobs` of one job."""
    registration = JobRegistration(
        sealed_secret=_KEYRING.seal(_SECRET.encode(), job_secret_purpose(_JOB)),
        job_id=_JOB,
        description=f"benchmark job {_JOB}: read, change, test",
    )
    records = [registration.record(door="cli", principal="operator")]
    for seq, kind in enumerate(_KINDS[:events], start=1):
        body = signed(seq, kind, _SECRET, job_id=_JOB, detail=f"{seq}/{events} of {_JOB}")
        records.append(raw_event(_JOB, canonical(body)))
    entries, row = Entries(), None
    for offset, outgoing in enumerate(records):
        row = settle(as_read(outgoing, offset, partition=0), entries, _KEYRING, Entries()).changes[0].row
    assert row is not None
    stored = [("job", _JOB, key, value, FOLD_VERSION, 0, events) for key, value in entries.stored().items()]
    return stored, (*(getattr(row, name) for name in row.__struct_fields__), 0, events)


def _copies(rows: list[TableRow], at: int, first: int, count: int) -> Iterator[TableRow]:
    for number in range(first, first + count):
        name = f"{number * 2654435761 % 2**32:08x}"
        for row in rows:
            yield (*row[:at], name, *row[at + 1 :])


def _append(settings: Settings, table: str, rows: Iterator[TableRow], progress: ViewProgress) -> None:
    schema = VIEW_ARROW[table]
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [
        pa.array(column, pa.int64()).cast(field.type) if pa.types.is_timestamp(field.type)
        else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]  # fmt: skip
    write_deltalake(
        settings.table_path(table),
        pa.Table.from_arrays(arrays, schema=schema),
        mode="append",
        commit_properties=progress.commit_properties(),
    )


def write_life(folder: Path, ended: int, live: int) -> None:
    """Write the tables of a life below a folder."""
    settings, first = Settings(data_dir=folder), 0
    for events, count in ((10, ended), (3, live)):
        entries, row = _folded(events)
        for begin in range(0, count, _JOBS_AT_ONCE):
            some = min(_JOBS_AT_ONCE, count - begin)
            for table, rows in ((REGISTRY_JOBS, [row]), (STREAM_ENTRIES, list(entries))):
                copies = _copies(rows, _NAMED_BY[table], first + begin, some)
                _append(settings, table, copies, NO_PROGRESS)
        first += count
    _append(settings, STREAM_ENTRIES, iter(()), ViewProgress({0: 11}, 0))


def load_once(folder: Path) -> dict[str, Any]:
    """Load the life below a folder in this process."""
    began, cpu = time.monotonic(), time.process_time()
    view = LiveView(Settings(data_dir=folder), _KEYRING, folder / "store")
    view.load()
    cpu, seconds = time.process_time() - cpu, time.monotonic() - began
    process = psutil.Process()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {
        "cpu_s": cpu,
        "wall_s": seconds,
        "rss_mb": process.memory_info().rss / 1e6,
        "anonymous_mb": int(status["RssAnon"].split()[0]) * 1024 / 1e6,
        "live": len(view.live(JobRow)),
        "known": len(view.live(JobRow)) + view.count_ended(JobRow, COMPLETED),
    }
    view.close()
    return found


def loaded(folder: Path) -> dict[str, Any]:
    """Load the life below a folder in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.warm_start", "--load", str(folder)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def starts(folder: Path, ended: int, live: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of a start from the tables, and the medians of those from the store after it."""
    write_life(folder, ended, live)
    cold, warm = loaded(folder), [loaded(folder) for _ in range(_STARTS)]
    for one in (cold, *warm):
        if (one["live"], one["known"]) != (live, ended + live):
            raise SystemExit(f"warm_start: {one} loaded instead of {live} live of {ended + live} jobs")
    return cold, {name: statistics.median(one[name] for one in warm) for name in cold}


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any] | None:
    """Load both lives; None in a process that loads one of them for the other one."""
    if args.load:
        print(json.dumps(load_once(Path(args.load))))
        return None
    cold, warm = starts(work / "all", args.ended, args.live)
    say(f"with ended jobs: from tables {cold}, from the store {warm}")
    _, alone = starts(work / "live", 0, args.live)
    say(f"without: from the store {alone}")
    names = ("cpu_s", "wall_s", "rss_mb", "anonymous_mb")
    return {
        "ended": args.ended,
        "live": args.live,
        **{f"tables_{name}": round(cold[name], 2) for name in names},
        **{f"store_{name}": round(warm[name], 2) for name in names},
        **{f"live_alone_{name}": round(alone[name], 2) for name in names},
        "start_ratio": round(warm["cpu_s"] / cold["cpu_s"], 3),
        "memory_ratio": round(warm["rss_mb"] / alone["rss_mb"], 3),
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("warm_start", __doc__, at_most={"start_ratio": 0.33, "memory_ratio": 1.3})
    bench.add_argument("--ended", type=int, default=1_000_000, metavar="N", help="ended jobs (1,000,000)")
    bench.add_argument("--live", type=int, default=10_000, metavar="N", help="running jobs (10,000)")
    bench.add_argument("--load", metavar="DIR", help=argparse.SUPPRESS)
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
