"""The settling task with what a test does to it, for Spark's Python workers: a death after its file is written,
and another folder for the local stores, as on another machine.

`crashing_streams.py` puts it in the place of the real one. The markers are those of `crash_points.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import pyarrow as pa

from jobs.settling import partition_task
from jobs.settling.partition_task import StageSettings
from tests.faults.prove.crash_points import Points

# Armed while tasks use other stores. No process dies there.
ELSEWHERE: Final = "elsewhere"
TASKS: Final = "tasks"
AFTER_FILE: Final = "after_file"


def settle_partitions(
    at: StageSettings, keyring_source: partition_task.KeyringSource, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Settle a task's records as the real function does."""
    if Points(TASKS).is_armed(ELSEWHERE):
        at = msgspec.structs.replace(at, stores=at.stores.with_name(f"{at.stores.name}-{ELSEWHERE}"))
    for file in partition_task.settle_partitions(at, keyring_source, batches):
        _of_this_worker().hit(AFTER_FILE)
        yield file


# One for all tasks of a worker, because it counts.
@functools.cache
def _of_this_worker() -> Points:
    return Points("streams")
