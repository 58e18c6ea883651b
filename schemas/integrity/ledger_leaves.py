"""The leaves of the ledger's Merkle trees: one hash for each row, over all of its columns.

The hashed bytes of a row (decision 0020 gives the reasons) are three parts:

1. For each column, in the encoding's order, one byte: 1 for a value, 0 for null.
2. For each column eight bytes, big-endian and signed: a number, a boolean as 0 or 1, a time as microseconds
   since 1970 UTC, the length in bytes of any other value, and 0 for null.
3. These other values one after the other, texts as UTF-8. A map is the sequence of its entries: the lengths of
   key and value as eight bytes each (-1 for a null value), the key, the value.

Each length comes before the value, and the first two parts have the same size for every row. Two different rows
therefore never give the same bytes.

The code works column by column with Arrow and numpy. Only the hash itself is computed row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.ledger import COLUMNS

HASH_BYTES: Final = 32
LEAF: Final = b"\x00"
NODE: Final = b"\x01"
EMPTY_ROOT: Final = sha256(b"").digest()


def leaf_hash(data: bytes) -> bytes:
    """Return the leaf hash of `data`: the SHA-256 of a zero byte and `data`."""
    return sha256(LEAF + data).digest()


def level_above(level: Sequence[bytes]) -> list[bytes]:
    """Return the next level of a Merkle tree: one node for each pair of nodes of `level`.

    `level` has at least two nodes, which are hashes of 32 bytes. An odd last node moves up unchanged.
    """
    pairs = zip(level[::2], level[1::2], strict=False)
    above = [sha256(NODE + left + right).digest() for left, right in pairs]
    if len(level) % 2:
        above.append(level[-1])
    return above


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the Merkle root (32 bytes) over `leaves`, which are hashes that `leaf_hash` returns, in order.

    Without leaves, the root is the SHA-256 of no bytes.
    """
    if not leaves:
        return EMPTY_ROOT
    level = leaves
    while len(level) > 1:
        level = level_above(level)
    return level[0]


def root_and_level(leaves: Sequence[bytes], most: int) -> tuple[bytes, list[bytes], int]:
    """Return the Merkle root of `leaves` and a small level of the tree, to find where two trees differ.

    `leaves` are hashes that `leaf_hash` returns, in order. `most` is the largest number of nodes of the level,
    at least 1.

    Returns:
        The root, the lowest level that has at most `most` nodes, and the number of leaves below each of its
        nodes. The last node of the level may have fewer leaves.
    """
    level, covered = list(leaves), 1
    while len(level) > most:
        level, covered = level_above(level), covered * 2
    return merkle_root(level), level, covered


# A version that adds columns, always at the end, adds an encoding. Hashes by an older encoding stay valid.
ENCODINGS: Final[dict[int, tuple[str, ...]]] = {
    1: COLUMNS[: COLUMNS.index("wire") + 1],
    2: COLUMNS[: COLUMNS.index("mac") + 1],
}
NEWEST_ENCODING: Final = max(ENCODINGS)
# Stands for a row with a value in a column that its encoding does not include. No row hashes to it.
NO_LEAF: Final = bytes(32)


def ledger_leaves(batch: pa.RecordBatch, columns: Sequence[str]) -> list[bytes]:
    """Hash ledger rows. Return the leaf of the Merkle tree (32 bytes) for each row of `batch`.

    Args:
        batch: ledger rows with all columns of the ledger (`LEDGER_ARROW`).
        columns: the columns to hash: the value in `ENCODINGS` for the encoding of the chain entry. Columns that
            were added to the ledger later must be null: a row with a value in one of them gets `NO_LEAF`, 32
            zero bytes.
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
    """Return the bytes to hash for each row of `batch`, as an Arrow array of large binaries.

    They are a null flag for each column, then a number or a length for each column, then the texts. The top of
    this module gives the details. The zero byte before each leaf is not included. `columns` are the columns to
    encode, one of the values of `ENCODINGS`.
    """
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
            known = pc.fill_null(column.cast(pa.int64()), 0)
            numbers[:, at] = known.to_numpy(zero_copy_only=False)
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


def _map_bytes(column: pa.MapArray) -> pa.Array:
    """Return each row's map entries as bytes, null for a null map."""
    ends = np.asarray(column.offsets, dtype=np.int64)
    # For a slice, `keys` and `items` are those of the whole array, and `offsets` refers to them.
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
    """Return the start of each value of a large binary array in its data, and the end of the last one."""
    return np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]
