"""The Merkle tree against the definition in RFC 9162, section 2.1.1, and against fixed values."""

from __future__ import annotations

from hashlib import sha256

import pytest

from schemas.integrity.ledger_leaves import EMPTY_ROOT, leaf_hash, merkle_root, root_and_level


def by_definition(data: list[bytes]) -> bytes:
    """MTH, as the RFC writes it: split at the largest power of two below the number of leaves."""
    if not data:
        return sha256(b"").digest()
    if len(data) == 1:
        return sha256(b"\x00" + data[0]).digest()
    split = 1
    while split * 2 < len(data):
        split *= 2
    return sha256(b"\x01" + by_definition(data[:split]) + by_definition(data[split:])).digest()


@pytest.mark.parametrize("count", [*range(18), 31, 32, 33, 63, 65, 100])
def test_the_root_is_that_of_the_definition(count: int) -> None:
    data = [b"row %d" % number for number in range(count)]
    assert merkle_root([leaf_hash(row) for row in data]) == by_definition(data)


def test_roots_are_those_that_certificate_transparency_logs_compute() -> None:
    texts = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    leaves = [leaf_hash(bytes.fromhex(text)) for text in texts]
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert merkle_root(leaves[:2]).hex() == "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"
    assert merkle_root(leaves[:3]).hex() == "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"
    assert merkle_root(leaves).hex() == "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"


@pytest.mark.parametrize("count", [1, 32, 33, 64, 65, 1000])
def test_the_level_that_is_kept_covers_all_leaves_and_each_node_is_a_tree_of_its_own(count: int) -> None:
    leaves = [leaf_hash(b"%d" % number) for number in range(count)]
    root, level, covered = root_and_level(leaves, 32)
    assert root == merkle_root(leaves) and len(level) <= 32
    assert level == [merkle_root(leaves[at : at + covered]) for at in range(0, count, covered)]
