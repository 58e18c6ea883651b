"""The progress of a part that is starting: its processes use the processor, or its log grows."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

_SAMPLE_S = 1.0


class StartProgress:
    """Watches one start. A slow machine makes progress slower, and still makes it: the time that a start may
    take in all has no limit here.
    """

    def __init__(self, pid: int, log: Path) -> None:
        self._pid = pid
        self._log = log
        self._seen = self._measure()
        self._sampled_at = self._moved_at = time.monotonic()

    def stalled_for_s(self) -> float:
        """Return for how many seconds nothing has changed. Measures at most once a second."""
        now = time.monotonic()
        if now - self._sampled_at >= _SAMPLE_S:
            self._sampled_at = now
            seen = self._measure()
            if seen != self._seen:
                self._seen, self._moved_at = seen, now
        return now - self._moved_at

    def _measure(self) -> tuple[float, int]:
        """The processor time of the process and all that it started, and the size of its log."""
        try:
            size = self._log.stat().st_size
        except OSError:
            size = 0
        return round(_processor_s(self._pid), 3), size


def _processor_s(pid: int) -> float:
    total = 0.0
    try:
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    except psutil.Error:
        return total
    for one in processes:
        try:
            total += sum(one.cpu_times()[:4])  # user, system, and both of children that were waited for
        except psutil.Error:
            continue
    return total
