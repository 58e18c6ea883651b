"""Whether the stack is as fast and as small after thousands of commits as after the first hundred.

Runs the whole stack on free ports under a steady load until the ledger has so many commits, with maintenance on
(`--unmaintained`: without, as a control). Looks from outside: how long each micro-batch took (between the two
files that Spark writes for it), how many live files each table has, how much memory each part's processes hold.

    ./trunkline bench endurance --commits 2000 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from deltalake import DeltaTable

from connectors.local_stack import LocalStack, free_port
from schemas.ledger import LEDGER
from schemas.sealing import load_keyring
from schemas.settings import (
    AgentMcpSettings,
    DashboardSettings,
    GatewaySettings,
    KafkaSettings,
    MqttSettings,
    Settings,
    ViewSettings,
)
from schemas.views import VIEW_TABLES
from tests.benchmarks.event_load import TopicWriter, events, jobs_for, registrations

EARLY = (100, 300)
LATE = 200
MEMORY_AFTER_S = 600
LOOK_S = 0.5
TELL_S = 60
# A load for this long at once; the next one has jobs of its own.
ROUND_S = 60


class BatchTimes(threading.Thread):
    """Notes for each micro-batch of the settling query how long it took, in ms, until `stop`."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(daemon=True)
        self._checkpoint = checkpoint
        self.took_ms: dict[int, float] = {}
        self.stop = threading.Event()

    def run(self) -> None:
        """Look while both files of a micro-batch are there: Spark keeps the last hundred."""
        while not self.stop.wait(LOOK_S):
            begun, ended = (self._moments(folder) for folder in ("offsets", "commits"))
            for batch, moment in ended.items():
                if batch in begun:
                    self.took_ms.setdefault(batch, (moment - begun[batch]) * 1000)

    def _moments(self, folder: str) -> dict[int, float]:
        found = {}
        for path in (self._checkpoint / folder).glob("[0-9]*"):
            with suppress(OSError, ValueError):
                found[int(path.name)] = path.stat().st_mtime
        return found


class Load(threading.Thread):
    """Writes signed events into the log at a steady rate until `stop`, as the bridge does; of jobs from the
    number `first` on.
    """

    def __init__(self, settings: Settings, rate: int, first: int = 0) -> None:
        super().__init__(daemon=True)
        self._settings, self._rate, self._first = settings, rate, first
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
        kafka, keyring, first = self._settings.kafka, load_keyring(self._settings), self._first
        writer = TopicWriter(kafka.bootstrap_servers, kafka.topic)
        began, number = time.monotonic(), 0
        while not self.stop.is_set():
            count = self._rate * ROUND_S
            for record in registrations(jobs_for(count), keyring, first):
                writer.append(record)
            for record in events(count, seed=first + 1, first=first):
                if self.stop.is_set():
                    break
                if number % 10 == 0:
                    time.sleep(max(0.0, began + number / self._rate - time.monotonic()))
                writer.append(record)
                number += 1
            self.sent, first = number, first + jobs_for(count)
        writer.flush()


def live_files(settings: Settings) -> dict[str, int]:
    """How many data files the newest version of each table has."""
    found = {}
    for table in (LEDGER, *VIEW_TABLES):
        path = settings.table_path(table)
        if DeltaTable.is_deltatable(path):
            found[table] = len(DeltaTable(path).file_uris())
    return found


def memory_mb(stack: LocalStack) -> dict[str, float]:
    """Resident memory of each part's processes, with their children."""
    found: dict[str, float] = {}
    for name, part in stack.parts.items():
        if part.pid is None:
            continue
        with suppress(psutil.Error):
            process = psutil.Process(part.pid)
            mine = [process, *process.children(recursive=True)]
            found[name] = sum(one.memory_info().rss for one in mine) / 1e6
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """One quantile."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def compared(took_ms: dict[int, float]) -> dict[str, Any]:
    """The last 200 micro-batches beside the numbers 100 to 300."""
    ordered = [took_ms[batch] for batch in sorted(took_ms)]
    early, late = ordered[EARLY[0] : EARLY[1]], ordered[-LATE:]
    if len(ordered) < EARLY[1] + LATE:
        raise SystemExit(f"endurance: {len(ordered)} micro-batches are too few")
    medians = [statistics.median(part) for part in (early, late)]
    p95s = [quantile(part, 0.95) for part in (early, late)]
    return {
        "early_median_ms": round(medians[0], 1),
        "late_median_ms": round(medians[1], 1),
        "median_ratio": round(medians[1] / medians[0], 3),
        "early_p95_ms": round(p95s[0], 1),
        "late_p95_ms": round(p95s[1], 1),
        "p95_ratio": round(p95s[1] / p95s[0], 3),
    }


def measure(settings: Settings, commits: int, rate: int, limit_s: float) -> dict[str, Any]:
    """Start, load, look on, compare."""
    most: dict[str, int] = defaultdict(int)
    memory: dict[str, float] = {}
    with LocalStack(settings) as stack:
        times, load = BatchTimes(Path(settings.checkpoints_root) / "settle_events"), Load(settings, rate)
        began = told = time.monotonic()
        times.start()
        load.start()
        while len(times.took_ms) < commits and time.monotonic() - began < limit_s:
            stack.look_after()
            time.sleep(LOOK_S)
            if load.failure is not None:
                raise SystemExit(f"endurance: the load ended: {load.failure}")
            now = time.monotonic()
            if not memory and now - began >= MEMORY_AFTER_S:
                memory = memory_mb(stack)
            if now - told >= TELL_S:
                told = now
                for table, count in live_files(settings).items():
                    most[table] = max(most[table], count)
                print(f"endurance: {len(times.took_ms)} of {commits} commits", file=sys.stderr)
        last_memory, last_files = memory_mb(stack), live_files(settings)
        restarts = {name: part.restarts for name, part in stack.parts.items() if part.restarts}
        load.stop.set()
        times.stop.set()
        load.join(30)
    return {
        "commits": len(times.took_ms),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "events": load.sent,
        **compared(times.took_ms),
        "live_files": {table: {"most": most[table], "last": count} for table, count in last_files.items()},
        "memory_mb": {
            name: {"after_10_min": round(memory.get(name, 0)), "last": round(last)}
            for name, last in last_memory.items()
        },
        "memory_ratio": {
            name: round(last / memory[name], 3) for name, last in last_memory.items() if name in memory
        },
        "restarts": restarts,
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    parser = argparse.ArgumentParser(prog="trunkline bench endurance", description=__doc__)
    parser.add_argument("--commits", type=int, default=2000, help="micro-batches to wait for (default 2000)")
    parser.add_argument("--rate", type=int, default=200, help="events a second (default 200)")
    parser.add_argument("--maintenance", type=float, default=60, help="seconds between two rounds (default 60)")
    parser.add_argument("--unmaintained", action="store_true", help="the control: without maintenance")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which it ends (default 3600)")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trunkline-endurance-") as work:
        settings = Settings(
            data_dir=Path(work) / "data",
            kafka=KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"),
            mqtt=MqttSettings(port=free_port()),
            gateway=GatewaySettings(port=free_port()),
            dashboard=DashboardSettings(port=free_port()),
            agent_mcp=AgentMcpSettings(port=free_port()),
            views=ViewSettings(maintenance_interval_s=0 if args.unmaintained else args.maintenance),
        )
        result = {"maintained": not args.unmaintained, **measure(settings, args.commits, args.rate, args.limit)}
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
