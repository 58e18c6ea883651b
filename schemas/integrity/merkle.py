"""Merkle trees as RFC 9162, section 2.1.1, defines them, over leaves that are hashed already.

A leaf is the SHA-256 of a zero byte and the row's bytes. A node is the SHA-256 of a one byte and its two
children, so that no node can pass for a leaf. RFC 9162 splits a tree at the largest power of two below its
number of leaves. Hashing pairs level by level, with an odd last node moved up unchanged, gives the same root.
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
    """Return the leaf of `data`."""
    return sha256(LEAF + data).digest()


def level_above(level: Sequence[bytes]) -> list[bytes]:
    """Return the nodes above those of `level`, which has at least two."""
    pairs = zip(level[::2], level[1::2], strict=False)
    above = [sha256(NODE + left + right).digest() for left, right in pairs]
    if len(level) % 2:
        above.append(level[-1])
    return above


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over `leaves` in their order. Without leaves it is the hash of no bytes."""
    if not leaves:
        return EMPTY_ROOT
    level = leaves
    while len(level) > 1:
        level = level_above(level)
    return level[0]


def root_and_level(leaves: Sequence[bytes], most: int) -> tuple[bytes, list[bytes], int]:
    """Return the root, the lowest level with at most `most` nodes, and the number of leaves per node.

    The last node of the level may cover fewer leaves.
    """
    level, covered = list(leaves), 1
    while len(level) > most:
        level, covered = level_above(level), covered * 2
    return merkle_root(level), level, covered
