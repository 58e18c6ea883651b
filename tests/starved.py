"""Less of the processor than a program wants: its processes are stopped nine tenths of the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from connectors.programs.local_stack import child_process

_PERIOD_S = 0.25


@contextmanager
def a_tenth_of_the_processor(mark: str) -> Iterator[None]:
    """Let all processes with this mark run a tenth of the time: the rest of it they are stopped."""
    over = threading.Event()

    def limit() -> None:
        while not over.wait(_PERIOD_S / 10):
            found = child_process.marked_processes(mark)
            for process in found:
                with suppress(psutil.Error):
                    process.suspend()
            over.wait(_PERIOD_S * 9 / 10)
            for process in found:
                with suppress(psutil.Error):
                    process.resume()

    thread = threading.Thread(target=limit)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(20)
