"""The cost of knowing the keys of a view table: memory, start, and one merge, by the number of keys.

For each number of rows, a table `stream_entries` is filled with entries of messages. Then processes of their
own open it: without its index, with it, and for merges. Each merge changes 300 of the 500 newest rows and adds
200. Memory is what the opened table adds to the process: all of it, and without pages of files, which the
kernel can take back. Sizes are those of the index after the table was filled, and after it was made again.

    ./trunkline bench view_index --keys 10000,1000000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.views.view_changes import Key, RowChange
from jobs.views.view_tables import ViewTable
from schemas.streams.kinds import STREAM_ENTRIES
from tests.benchmarks.bench_report import Bench

MAILBOXES, HOT, CHANGED, ADDED = 1000, 500, 300, 200
FILL_ROWS = 100_000


def key_of(number: int) -> Key:
    """The key of the entry of a message."""
    draw = random.Random(number)
    message = uuid.UUID(int=draw.getrandbits(128), version=4)
    return (
        "mailbox",
        f"default/agent-{draw.randrange(MAILBOXES)}",
        f"m/5/{1_790_000_000_000 + number}/{message}",
    )


def change_of(key: Key, offset: int) -> RowChange:
    """A change of an entry of 100 bytes."""
    cells = dict(zip(("stream_kind", "stream_id", "entry"), key, strict=True))
    return RowChange(0, offset, {**cells, "value": random.Random(offset).randbytes(100), "fold_version": 9})


def open_table(folder: Path) -> ViewTable:
    """Open the table in a folder."""
    return ViewTable(str(folder / "table"), STREAM_ENTRIES, folder / "index")


def fill(folder: Path, keys: int) -> dict[str, Any]:
    """Fill a new table and tidy it."""
    table = open_table(folder)
    for first in range(0, keys, FILL_ROWS):
        numbers = range(first, min(keys, first + FILL_ROWS))
        table.apply({key: change_of(key, number) for number in numbers for key in [key_of(number)]})
    table.tidy(0)
    table.tidy(0)
    return {}


def memory() -> dict[str, float]:
    """The memory of this process in MB: all, without pages of files, and the most so far."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {
        line[0].rstrip(":"): int(line[1]) / 1024
        for line in lines
        if line[0].startswith(("VmRSS", "VmHWM", "Rss"))
    }
    return {"mb": found["VmRSS"], "anon_mb": found["RssAnon"], "most_mb": found["VmHWM"]}


def start(folder: Path, keys: int) -> dict[str, Any]:
    """Open the table."""
    return _opened(folder)[1]


def _opened(folder: Path) -> tuple[ViewTable, dict[str, Any]]:
    before, began, cpu = memory(), time.perf_counter(), time.process_time()
    table = open_table(folder)
    took = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    grown = {name: after - before[name] for name, after in memory().items()}
    return table, {name: round(value, 2) for name, value in {**took, **grown}.items()}


def merge(folder: Path, keys: int, merges: int = 20) -> dict[str, Any]:
    """Open the table, and merge."""
    before = memory()
    table = open_table(folder)
    draw, walls, cpus = random.Random(1), [], []
    for number in range(merges):
        end = keys + number * ADDED
        numbers = [*draw.sample(range(end - HOT, end), CHANGED), *range(end, end + ADDED)]
        batch = {key: change_of(key, keys + number) for key in map(key_of, numbers)}
        began, cpu = time.perf_counter(), time.process_time()
        table.apply(batch)
        walls.append(time.perf_counter() - began)
        cpus.append(time.process_time() - cpu)
    grown = {name: round(after - before[name], 1) for name, after in memory().items()}
    return {
        "ms": round(statistics.median(walls) * 1000),
        "cpu_ms": round(statistics.median(cpus) * 1000),
        **grown,
    }


def stored_mb(folder: Path) -> float:
    """MB of the files in a folder."""
    return round(sum(file.stat().st_blocks * 512 for file in folder.glob("*")) / 1e6, 1)


def in_process(work: Callable[[Path, int], dict[str, Any]], folder: Path, keys: int) -> dict[str, Any]:
    """Run `work` in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (folder, keys))


def measure(args: argparse.Namespace, work: Path) -> None:
    """Measure each number of keys and print a line of JSON for it."""
    for keys in map(int, args.keys.split(",")):
        folder = work / str(keys)
        in_process(fill, folder, keys)
        filled_mb = stored_mb(folder / "index")
        shutil.rmtree(folder / "index")
        found = {name: in_process(start, folder, keys) for name in ("cold", "warm")}
        sizes = {"filled_mb": filled_mb, "made_again_mb": stored_mb(folder / "index")}
        found["merge"] = in_process(merge, folder, keys)
        print(json.dumps({"keys": keys, **sizes, **found}), flush=True)


def main() -> int:
    """Run the benchmark. The output is JSON with and without `--json`."""
    bench = Bench("view_index", __doc__)
    bench.add_argument("--keys", default="10000,1000000", help="rows that the table has")
    return bench.run(measure)


if __name__ == "__main__":
    raise SystemExit(main())
