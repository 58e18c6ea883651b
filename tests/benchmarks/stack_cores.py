"""The share of the processor that each program of a stack uses, whichever checkout started it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import suppress
from typing import Final

import psutil

from connectors.local_stack import child_process
from connectors.local_stack.part_plan import STREAMS
from schemas.settings.settings import Settings

LOAD: Final = "load"
# Spark's JVM, and its driver and workers.
STREAMS_JVM, STREAMS_PYTHON = f"{STREAMS}_jvm", f"{STREAMS}_python"


def cpu_seconds(settings: Settings) -> dict[str, float]:
    """Return the CPU time that the programs of a stack have used so far, in seconds, by program.

    A process that has ended counts with its parent. `load` is the calling process, without its children.

    Args:
        settings: The settings of the stack. Its data directory tells which processes belong to it.
    """
    own = psutil.Process().cpu_times()
    found: defaultdict[str, float] = defaultdict(float, {LOAD: own.user + own.system})
    prefix = child_process.mark_of(settings.data_path, "")
    for process in child_process.marked_processes(prefix):
        with suppress(psutil.Error):
            part = process.environ()[child_process.MARK].removeprefix(prefix).rstrip(";")
            if part == STREAMS:
                part = STREAMS_JVM if process.name() == "java" else STREAMS_PYTHON
            found[part] += sum(process.cpu_times()[:4])
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
        before, began = cpu_seconds(self._settings), time.monotonic()
        time.sleep(self._for_s)
        after, took_s = cpu_seconds(self._settings), time.monotonic() - began
        self.cores = {name: (after[name] - before.get(name, 0.0)) / took_s for name in after}
