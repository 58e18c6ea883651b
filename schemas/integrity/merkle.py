"""Merkle trees as RFC 9162, section 2.1.1, defines them, over leaves that are hashed already.

A leaf is SHA-256 of a zero byte and the row's bytes, a node SHA-256 of a one byte and its two children, so
that no node can pass for a leaf. The tree splits at the largest power of two below its number of leaves;
hashing pairs level by level, with an odd last node going up as it is, gives the same root.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

HASH_BYTES: Final = 32
LEAF: Final = b"\x00"
NODE: Final = b"\x01"
EMPTY_ROOT: Final = sha256(b"").digest()


def leaf_hash(data: bytes) -> bytes:
    """The leaf of `data`."""
    return sha256(LEAF + data).digest()


def level_above(level: Sequence[bytes]) -> list[bytes]:
    """The nodes above those of `level`, which has two at least."""
    pairs = zip(level[::2], level[1::2], strict=False)
    above = [sha256(NODE + left + right).digest() for left, right in pairs]
    if len(level) % 2:
        above.append(level[-1])
    return above


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The root over `leaves` in their order; of none it is the hash of nothing."""
    if not leaves:
        return EMPTY_ROOT
    level = leaves
    while len(level) > 1:
        level = level_above(level)
    return level[0]


def root_and_level(leaves: Sequence[bytes], most: int) -> tuple[bytes, list[bytes], int]:
    """The root; the lowest level with at most `most` nodes; and how many leaves each of these covers, the last
    one perhaps fewer.
    """
    level, covered = list(leaves), 1
    while len(level) > most:
        level, covered = level_above(level), covered * 2
    return merkle_root(level), level, covered
