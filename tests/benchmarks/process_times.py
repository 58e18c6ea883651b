"""The processor time of processes, read from the kernel's clock of each process.

The clock (clock_getcpuclockid(3)) counts nanoseconds, and the threads that have ended, too.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

import psutil

from connectors.programs.local_stack import child_process
from connectors.programs.local_stack.part_plan import KAFKA, STREAMS
from schemas.settings.settings import Settings
from tests.benchmarks.bench_report import LOAD

# Spark's JVM, and its driver and workers.
STREAMS_JVM, STREAMS_PYTHON = f"{STREAMS}_jvm", f"{STREAMS}_python"


def process_s(pid: int) -> float:
    """Return the processor time that a process and its ended children have used, in seconds.

    Raises:
        OSError: The process has ended.
        psutil.NoSuchProcess: The same.
    """
    children = psutil.Process(pid).cpu_times()
    # The clock of another process, as in clock_getcpuclockid of the C library.
    own = time.clock_gettime((~pid << 3) | 2)
    return float(own + children.children_user + children.children_system)


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all processes below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def spark_s(kafka_pid: int) -> dict[str, float]:
    """Return the processor time of Kafka and of the Spark that this process drives so far, in seconds.

    `driver` is this process, `workers` are the Python processes of Spark's JVM. Other children do not count.
    """
    found = {"driver": time.process_time(), "jvm": 0.0, "workers": 0.0, KAFKA: 0.0}
    broker = {process.pid for process in tree(kafka_pid)}
    jvms = [one for one in psutil.Process().children() if one.name() == "java" and one.pid not in broker]
    for name, processes in ((KAFKA, tree(kafka_pid)), ("jvm", jvms)):
        found[name] = sum(process_s(one.pid) for one in processes)
    for worker in (worker for jvm in jvms for worker in jvm.children(recursive=True)):
        with suppress(OSError, psutil.Error):
            found["workers"] += process_s(worker.pid)
    return found


def stack_s(settings: Settings) -> dict[str, float]:
    """Return the processor time that the programs of a stack have used so far, in seconds, by program.

    `load` is the calling process. The streaming jobs are two programs: their JVM, and their Python processes.

    Args:
        settings: The settings of the stack. Its data directory tells which processes belong to it.
    """
    found: defaultdict[str, float] = defaultdict(float, {LOAD: time.process_time()})
    prefix = child_process.mark_of(settings.data_path, "")
    for process in child_process.marked_processes(prefix):
        with suppress(OSError, psutil.Error):
            part = process.environ()[child_process.MARK].removeprefix(prefix).rstrip(";")
            if part == STREAMS:
                part = STREAMS_JVM if process.name() == "java" else STREAMS_PYTHON
            found[part] += process_s(process.pid)
    return dict(found)


class CoreMeter(threading.Thread):
    """Measures the cores that a stack uses for some seconds, some seconds after `start`.

    `cores` has them by program after `join`.
    """

    def __init__(self, settings: Settings, after_s: float, for_s: float) -> None:
        super().__init__(daemon=True)
        self._settings, self._after_s, self._for_s = settings, after_s, for_s
        self.cores: dict[str, float] = {}

    def run(self) -> None:
        """Wait, look, wait, and look again."""
        time.sleep(self._after_s)
        before, began = stack_s(self._settings), time.monotonic()
        time.sleep(self._for_s)
        after, took_s = stack_s(self._settings), time.monotonic() - began
        self.cores = {name: (after[name] - before.get(name, 0.0)) / took_s for name in after}


class Meter:
    """Measures the processor time of processes and of this program, `load`, between two moments.

    Args:
        pids: The process ids by name. The processes below them count, too, if they run now.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._trees = {name: [one.pid for one in tree(pid)] for name, pid in pids.items()}
        self._trees[LOAD] = [os.getpid()]
        self._before: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def _read(self) -> dict[str, float]:
        return {name: sum(map(process_s, pids)) for name, pids in self._trees.items()}

    def begin(self) -> None:
        """Begin to measure."""
        self._before = self._read()

    def end(self) -> None:
        """End to measure."""
        self._used = {name: after - self._before[name] for name, after in self._read().items()}

    async def between(self, begin: float, end: float) -> None:
        """Measure between two moments of `time.monotonic`."""
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        self.begin()
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        self.end()

    def us_per(self, count: int) -> dict[str, float]:
        """Return the microseconds of each process for one of `count` operations, and of this program."""
        return {name: 1e6 * used / max(1, count) for name, used in self._used.items()}
