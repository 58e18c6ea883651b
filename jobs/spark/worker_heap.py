"""Keeps the garbage collector of Spark's Python workers away from the modules that their tasks import."""

from __future__ import annotations

import functools
import gc


@functools.cache
def keep_modules(task: str) -> None:
    """Exclude the objects that this process has now from garbage collection.

    Later objects are collected as usual. The excluded ones are mostly modules that a task has imported.
    pyspark.daemon calls `gc.collect()` at the end of each task. With pyarrow, pandas and the models in memory,
    that takes 100 ms and more in each worker of a micro-batch, and frees almost no memory.

    Args:
        task: Any name for the kind of Spark task, such as "pack". In each process, later calls with the same
            name do nothing.
    """
    gc.collect()
    gc.freeze()
