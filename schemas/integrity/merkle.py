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
