"""A Python worker's garbage collector does not walk the modules' objects again after each task."""

from __future__ import annotations

import sys

from tests.programs import run_program

_WORKER = """
import gc
from jobs.settling.partition_task import keep_modules
keep_modules()
kept = gc.get_freeze_count()
more = [[] for _ in range(1000)]
keep_modules()
print(kept, gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_what_a_tasks_modules_made_is_kept_from_the_collector_once() -> None:
    # In a process of its own: what is frozen stays so.
    ran = run_program([sys.executable, "-c", _WORKER], check=True)
    kept, again, left = map(int, ran.stdout.split())
    assert kept > 10_000
    assert kept - 1_000 < again <= kept  # some of it has gone, nothing has come
    assert left < 10_000
