"""A place in the log, and the Kafka partition of a stream: Kafka's default partitioner, MurmurHash2.

The fold needs it, and imports no Kafka client. Source of the algorithm: Austin Appleby's MurmurHash2 (32 bits),
with the seed and the sign bit of `org.apache.kafka.common.utils.Utils.murmur2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec

_SEED: Final = 0x9747B28C
_FACTOR: Final = 0x5BD1E995
_WORD: Final = 0xFFFFFFFF
_HASH_CACHE: Final = 65_536


class Position(msgspec.Struct, frozen=True, order=True, gc=False):
    """The place of a record in the log. Positions are ordered by partition, then offset."""

    partition: int
    offset: int

    def __iter__(self) -> Iterator[int]:
        """Yield the partition and the offset."""
        yield self.partition
        yield self.offset


@lru_cache(maxsize=_HASH_CACHE)
def partition_for(key: bytes, partitions: int) -> int:
    """Return the number of the partition to which records with the key `key` are appended.

    `partitions` is the partition count of the topic. Results are cached, because hashes are slow in Python.
    """
    found = _SEED ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        mixed = int.from_bytes(key[at : at + 4], "little") * _FACTOR & _WORD
        mixed = (mixed ^ mixed >> 24) * _FACTOR & _WORD
        found = found * _FACTOR & _WORD ^ mixed
    if whole < len(key):
        found = (found ^ int.from_bytes(key[whole:], "little")) * _FACTOR & _WORD
    found = (found ^ found >> 13) * _FACTOR & _WORD
    return ((found ^ found >> 15) & 0x7FFFFFFF) % partitions
