"""Keeps the garbage collector of Spark's Python workers away from the modules that their tasks import."""

from __future__ import annotations

import functools
import gc


@functools.cache
def keep_modules() -> None:
    """Exclude the objects that this process has now from garbage collection. A second call does nothing.

    Later objects are collected as usual. The excluded ones are mostly modules that a task has imported.
    pyspark.daemon calls `gc.collect()` at the end of each task. With pyarrow, pandas and the models in memory,
    that takes 100 ms and more in each worker of a micro-batch, and frees almost no memory.
    """
    gc.collect()
    gc.freeze()
