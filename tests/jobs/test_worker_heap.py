"""What a Python worker's modules have made is not walked again after each task."""

from __future__ import annotations

import subprocess
import sys

from schemas.settings import PROJECT_ROOT

_WORKER = """
import gc, sys
from jobs.record_packing import pack_records
list(pack_records([]))
packed = gc.get_freeze_count()
import jobs.settling
kept = [[] for _ in range(1000)]
list(pack_records([]))
again = gc.get_freeze_count()
from jobs.worker_heap import keep_modules
keep_modules("settle")
print(packed, again, gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_each_kind_of_task_keeps_what_its_modules_made_from_the_collector_once() -> None:
    # In a process of its own: what is frozen stays so.
    ran = subprocess.run(
        [sys.executable, "-c", _WORKER],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    packed, again, settled, left = map(int, ran.stdout.split())
    assert packed > 10_000
    assert packed - 1_000 < again <= packed  # some of it has gone, nothing has come
    assert settled > packed + 10_000
    assert left < 10_000
