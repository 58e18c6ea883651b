"""Measure whether the stack is as fast and as small after thousands of commits as after the first hundred.

Runs the whole stack on free ports under a steady load until the ledger has so many commits, with maintenance on
(`--unmaintained`: without, as a control), and for 20 minutes at least. Looks from outside: how long each
micro-batch took (between the two files that Spark writes for it), how many live files each table has (the most
in the first and the last third), how much memory each process holds (after 10 minutes and in the end). A
comparison that was not possible is in `errors`, beside all other figures. A limit that is exceeded is in
`not_held`. Both make the exit code 1. The accounts of ended jobs are kept for five minutes, and not for an hour
as by default.

    ./trunkline bench endurance --commits 2000 --json
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from connectors.programs.local_stack import LocalStack, free_port
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import MqttSettings, Settings, ViewSettings
from tests.benchmarks.bench_report import Bench, quantile
from tests.benchmarks.event_load import TopicWriter, events, jobs_for, registrations
from tests.benchmarks.stack_figures import FileLooks, MemoryLooks, files_ratio, resident_mb
from tests.own_settings import stack_settings

EARLY = (100, 300)
LATE = 200
MEMORY_AFTER_S = 600
# So long it runs at least, that memory in the end is not that of minute 10.
LEAST_S = 1200
# The control, without maintenance, has none.
AT_MOST = {"median_ratio": 1.15, "p95_ratio": 1.3, "memory_worst_ratio": 1.2, "files_worst_ratio": 1.5}
# Of the rate that was asked for: a load that falls behind measures something else.
AT_LEAST = {"rate_reached": 0.97}
# Accounts of jobs that have ended: by default they are kept for an hour, and minute 10 would be on the way up.
ACCOUNT_GRACE_S = 300
LOOK_S = 0.5
# No part of the seconds between two rounds of maintenance: looks come before and after them.
FIGURES_S = 7
TELL_S = 60
# A load for this long at once; the next one has jobs of its own.
ROUND_S = 60


class BatchTimes(threading.Thread):
    """Notes for each micro-batch of the settling query how long it took, in ms, until `stop`.

    `ended_s` is when it ended, in seconds since 1970.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(daemon=True)
        self._checkpoint = checkpoint
        self.took_ms: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}
        self.stop = threading.Event()

    def run(self) -> None:
        """Look while both files of a micro-batch are there: Spark keeps the last hundred."""
        while not self.stop.wait(LOOK_S):
            begun, ended = (self._moments(folder) for folder in ("offsets", "commits"))
            for batch, moment in ended.items():
                if batch in begun:
                    self.took_ms.setdefault(batch, (moment - begun[batch]) * 1000)
                    self.ended_s.setdefault(batch, moment)

    def _moments(self, folder: str) -> dict[int, float]:
        found = {}
        for path in (self._checkpoint / folder).glob("[0-9]*"):
            with suppress(OSError, ValueError):
                found[int(path.name)] = path.stat().st_mtime
        return found


class Load(threading.Thread):
    """Writes signed events into the log at a steady rate until `stop`, as the bridge does; of jobs from the
    number `first` on. `rounds`: after so many, of `round_s` each, it ends by itself.
    """

    def __init__(
        self,
        settings: Settings,
        rate: int,
        first: int = 0,
        *,
        round_s: int = ROUND_S,
        rounds: int | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._settings, self._rate, self._first = settings, rate, first
        self._round_s, self._rounds_left = round_s, math.inf if rounds is None else rounds
        self.stop = threading.Event()
        self.sent = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        """Rounds of registrations and events."""
        try:
            self._rounds()
        except Exception as error:
            self.failure = error

    def _rounds(self) -> None:
        keyring, first = load_keyring(self._settings), self._first
        writer = TopicWriter(self._settings)
        count = self._rate * self._round_s
        jobs = jobs_for(count)
        for record in registrations(jobs, keyring, first):
            writer.append(record)
        began, number = time.monotonic(), 0
        while not self.stop.is_set() and self._rounds_left > 0:
            self._rounds_left -= 1
            # The jobs of the next round are registered meanwhile, one now and then: a burst would be a batch of
            # its own kind each minute.
            following, registered = registrations(jobs, keyring, first + jobs), 0
            wanted = jobs if self._rounds_left > 0 else 0
            for place, record in enumerate(events(count, seed=first + 1, first=first), 1):
                if self.stop.is_set():
                    break
                if number % 10 == 0:
                    time.sleep(max(0.0, began + number / self._rate - time.monotonic()))
                writer.append(record)
                number += 1
                self.sent = number
                while registered < wanted and registered * count < place * jobs:
                    writer.append(next(following))
                    registered += 1
            first += jobs
        writer.flush()


def compared(took_ms: dict[int, float]) -> dict[str, Any]:
    """The last 200 micro-batches beside the numbers 100 to 300."""
    ordered = [took_ms[batch] for batch in sorted(took_ms)]
    early, late = ordered[EARLY[0] : EARLY[1]], ordered[-LATE:]
    if len(ordered) < EARLY[1] + LATE:
        return {"errors": [f"{len(ordered)} micro-batches are too few"]}
    medians = [statistics.median(part) for part in (early, late)]
    p95s = [quantile(part, 0.95) for part in (early, late)]
    return {
        "early_median_ms": round(medians[0], 1),
        "late_median_ms": round(medians[1], 1),
        "median_ratio": round(medians[1] / medians[0], 3),
        "early_p95_ms": round(p95s[0], 1),
        "late_p95_ms": round(p95s[1], 1),
        "p95_ratio": round(p95s[1] / p95s[0], 3),
        "errors": [],
    }


def measure(settings: Settings, commits: int, rate: int, least_s: float, limit_s: float) -> dict[str, Any]:
    """Start, load, look on, compare."""
    memory, files, errors = MemoryLooks(MEMORY_AFTER_S), FileLooks(settings), []
    with LocalStack(settings) as stack:
        times, load = BatchTimes(settings.state_path / "checkpoint"), Load(settings, rate)
        began = told = looked = time.monotonic()
        times.start()
        load.start()
        while True:
            stack.look_after()
            time.sleep(LOOK_S)
            now = time.monotonic()
            if now - looked >= FIGURES_S:
                looked = now
                memory.add(now - began, resident_mb(stack))
                files.add()
            if now - told >= TELL_S:
                told = now
                print(f"endurance: {len(times.took_ms)} of {commits} commits", file=sys.stderr)
            if load.failure is not None:
                errors.append(f"the load ended: {load.failure}")
                break
            if len(times.took_ms) >= commits and now - began >= least_s:
                break
            if now - began >= limit_s:
                errors.append(f"{len(times.took_ms)} of {commits} commits in {limit_s:.0f} s")
                break
        took_s = time.monotonic() - began
        restarts = {name: part.restarts for name, part in stack.parts.items() if part.restarts}
        load.stop.set()
        times.stop.set()
        load.join(30)
    batches, held, live_files = compared(times.took_ms), memory.figures(), files.figures()
    return {
        "commits": len(times.took_ms),
        "minutes": round(took_s / 60, 1),
        "events": load.sent,
        "rate_reached": round(load.sent / took_s / rate, 3),
        **batches,
        "live_files": live_files,
        "files_worst_ratio": files_ratio(live_files),
        **held,
        "restarts": restarts,
        "errors": [
            *errors,
            *(f"{name} was started again" for name in restarts),
            *batches["errors"],
            *held["errors"],
        ],
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("endurance", __doc__, AT_MOST, AT_LEAST)
    bench.add_argument("--commits", type=int, default=2000, help="micro-batches to wait for (default 2000)")
    bench.add_argument("--rate", type=int, default=200, help="events a second (default 200)")
    bench.add_argument("--maintenance", type=float, default=60, help="seconds between two rounds (default 60)")
    bench.add_argument("--unmaintained", action="store_true", help="the control: without maintenance")
    bench.add_argument(
        "--least", type=float, default=LEAST_S, help=f"seconds that it runs at least (default {LEAST_S})"
    )
    bench.add_argument("--limit", type=float, default=3600, help="seconds after which it ends (default 3600)")

    def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
        settings = stack_settings(
            work / "data",
            mqtt=MqttSettings(port=free_port(), account_grace_s=ACCOUNT_GRACE_S),
            views=ViewSettings(maintenance_interval_s=0 if args.unmaintained else args.maintenance),
        )
        figures = measure(settings, args.commits, args.rate, args.least, args.limit)
        return {"maintained": not args.unmaintained, **figures}

    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
