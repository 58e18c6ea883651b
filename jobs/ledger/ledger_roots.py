"""The Merkle roots of the rows that a task adds to the ledger, computed while it writes its file.

A partition's rows of a micro-batch are all in one task, in the order of their offsets, because a bucket is a
partition (buckets.py). Any other order is refused, because its root could not be checked later.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.integrity.audit_chain import partition_root, roots_text
from schemas.integrity.ledger_leaves import ENCODINGS, NEWEST_ENCODING, ledger_leaves


class FileRoots:
    """The roots of one file. Add the file's batches in order, then call `to_json`."""

    def __init__(self) -> None:
        self._leaves: dict[int, list[bytes]] = {}
        self._offsets: dict[int, tuple[int, int]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Hash the rows of `batch`, which must not be empty. Raises ValueError if they are not in order."""
        partitions = batch.column("partition")
        present = pc.unique(partitions).to_pylist()
        for partition in present:
            rows = batch if len(present) == 1 else batch.filter(pc.equal(partitions, partition))
            offsets = rows.column("offset").to_numpy(zero_copy_only=False)
            first, before = self._offsets.get(partition, (int(offsets[0]), -1))
            if offsets[0] <= before or (np.diff(offsets) <= 0).any():
                raise ValueError(f"rows of partition {partition} are not in the order of their offsets")
            self._offsets[partition] = first, int(offsets[-1])
            self._leaves.setdefault(partition, []).extend(ledger_leaves(rows, ENCODINGS[NEWEST_ENCODING]))

    def to_json(self) -> str:
        """Return the roots, one for each partition."""
        return roots_text(partition_root(p, self._offsets[p], leaves) for p, leaves in self._leaves.items())
