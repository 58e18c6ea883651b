"""The leaves of the ledger's Merkle trees: one hash for each row, over all of its columns.

What is hashed of a row, by encoding 1 (decision 0020 says why): for each column, in the encoding's order, one
byte, 1 if there is a value and 0 if it is null; then for each column eight bytes, big-endian and signed: a
number, a truth as 0 or 1, a time as microseconds since 1970 UTC, of any other value its length in bytes, and 0
for null; then those other values one after the other, texts as UTF-8. A map is the sequence of its entries:
the key's length and the value's, -1 for null, as eight bytes each, key, value. Lengths come before what they
measure and the first part is as long for every row, so two rows that differ never give the same bytes.

All is made column by column, in Arrow's and numpy's own loops: only the hash itself is called for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.integrity.merkle import LEAF
from schemas.tables.ledger_arrow import LEDGER_ARROW

# A column that a later version adds makes a new encoding; what was hashed by an older one stays true.
ENCODINGS: Final[dict[int, tuple[str, ...]]] = {
    1: (
        "topic",
        "partition",
        "offset",
        "stream_kind",
        "stream_id",
        "door",
        "principal",
        "ce_id",
        "type",
        "seq",
        "sent_at",
        "logged_at",
        "verdict",
        "reason",
        "why",
        "late",
        "masked",
        "status_after",
        "fold_version",
        "value",
        "value_sealed",
        "changes",
        "entries",
        "accepted_offset",
        "wire",
    )
}
NEWEST_ENCODING: Final = max(ENCODINGS)
# Of a row with a value in a column that its encoding does not know. No row has this leaf.
NO_LEAF: Final = bytes(32)


def ledger_leaves(batch: pa.RecordBatch, columns: Sequence[str]) -> list[bytes]:
    """The leaf of each row of `batch`, which has the columns of LEDGER_ARROW, by an encoding's `columns`. Those
    that are not among them were added later than the encoding and must be null.
    """
    if not batch.num_rows:
        return []
    encoded = encoded_rows(batch, columns)
    ends = _offsets_of(encoded).tolist()
    view, one = memoryview(encoded.buffers()[2]), sha256(LEAF)
    leaves, start = [], ends[0]
    for end in ends[1:]:
        leaf = one.copy()
        leaf.update(view[start:end])
        leaves.append(leaf.digest())
        start = end
    for name in LEDGER_ARROW.names:
        if name not in columns and batch.column(name).null_count < batch.num_rows:
            for at in np.flatnonzero(batch.column(name).is_valid().to_numpy(zero_copy_only=False)):
                leaves[at] = NO_LEAF
    return leaves


def encoded_rows(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """What is hashed of each row of `batch`, without the leading byte."""
    count, width = batch.num_rows, len(columns)
    head = np.zeros(count, dtype=[("there", "u1", (width,)), ("numbers", ">i8", (width,))])
    there, numbers, texts = head["there"], head["numbers"], []
    for at, name in enumerate(columns):
        column = batch.column(name)
        valid = column.is_valid()
        there[:, at] = valid.to_numpy(zero_copy_only=False)
        if column.null_count == count:
            continue
        if _is_number(column.type):
            known = column if column.null_count == 0 else pc.fill_null(column, _zero(column.type))
            numbers[:, at] = known.cast(pa.int64()).to_numpy(zero_copy_only=False)
            continue
        text = _map_bytes(column) if pa.types.is_map(column.type) else column.cast(pa.large_binary())
        numbers[:, at] = pc.fill_null(pc.binary_length(text), 0).to_numpy(zero_copy_only=False)
        texts.append(text)
    first = _large_binary(np.arange(count + 1, dtype=np.int64) * head.dtype.itemsize, pa.py_buffer(head))
    return pc.binary_join_element_wise(
        first, *texts, pa.scalar(b"", pa.large_binary()), null_handling="replace", null_replacement=b""
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_timestamp(kind))


def _zero(kind: pa.DataType) -> Any:
    return pa.scalar(0, pa.int64()).cast(kind)


def _map_bytes(column: pa.MapArray) -> pa.Array:
    """Each row's entries as bytes, null for a null."""
    ends = np.asarray(column.offsets, dtype=np.int64)
    # Of a slice, `keys` and `items` are those of the whole, as `offsets` counts them.
    keys, items = column.keys.cast(pa.large_binary()), column.items.cast(pa.large_binary())
    lengths = np.empty((len(keys), 2), dtype=">i8")
    lengths[:, 0] = pc.binary_length(keys).to_numpy(zero_copy_only=False)
    lengths[:, 1] = pc.fill_null(pc.binary_length(items), -1).to_numpy(zero_copy_only=False)
    heads = _large_binary(np.arange(len(keys) + 1, dtype=np.int64) * 16, pa.py_buffer(lengths))
    nothing = pa.scalar(b"", pa.large_binary())
    joined = pc.binary_join_element_wise(
        heads, keys, items, nothing, null_handling="replace", null_replacement=b""
    )
    _, _, data = joined.buffers()
    found = _large_binary(_offsets_of(joined)[ends], data)
    return pc.if_else(column.is_valid(), found, pa.scalar(None, pa.large_binary()))


def _large_binary(ends: Any, data: pa.Buffer | None) -> pa.Array:
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(ends) - 1, [None, pa.py_buffer(ends), data or pa.py_buffer(b"")]
    )


def _offsets_of(array: pa.Array) -> Any:
    """Where the values of a large binary array begin in its data, and where the last one ends."""
    return np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]
