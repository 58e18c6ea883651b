"""What Spark's Python workers are spared: walking all that their modules have made, after each task.

pyspark.daemon calls `gc.collect()` when a task has ended. With pyarrow, pandas and the models in memory that
takes 100 ms and more, in each worker of a micro-batch, and frees next to nothing.
"""

from __future__ import annotations

import functools
import gc


@functools.cache
def keep_modules(task: str) -> None:
    """Let the collector leave alone what is in this process now: what the first task of a kind has imported.

    Once for each kind, for one worker runs several; what comes later is looked at as ever.
    """
    gc.collect()
    gc.freeze()
