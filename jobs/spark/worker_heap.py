"""A shorter garbage collection in Spark's Python workers after each task.

pyspark.daemon calls `gc.collect()` at the end of each task. With pyarrow, pandas and the models in memory, that
takes 100 ms and more in each worker of a micro-batch, and frees almost no memory.
"""

from __future__ import annotations

import functools
import gc


@functools.cache
def keep_modules(task: str) -> None:
    """Exclude the current objects of this process from garbage collection, once for each kind of task.

    These are mostly the modules that the first task of a kind has imported. Later objects are collected as
    usual.
    """
    gc.collect()
    gc.freeze()
