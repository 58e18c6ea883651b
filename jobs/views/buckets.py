"""The keys under which Spark stores the settling job's state, one for each Kafka partition (a bucket)."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

_SPREAD = 64


def bucket_key(partition: int) -> int:
    """Return the integer under which Spark stores the state of a Kafka partition.

    The key of a partition never changes, because checkpoints contain it. Spark places an integer key by
    Murmur3, which often puts small consecutive integers into one shuffle partition. So the key is the first
    integer, from 1,024 times the partition on, whose hash ends like the partition's number. With these keys,
    Spark distributes the Kafka partitions evenly over 2, 4, … or 64 shuffle partitions.
    """
    candidate = partition * _SPREAD * 16
    while spark_hash(candidate) % _SPREAD != partition % _SPREAD:
        candidate += 1
    return candidate


def spark_hash(number: int) -> int:
    """Return Spark's `hash()` of one 32-bit integer: Murmur3 x86 32-bit with seed 42, unsigned."""
    mask = 0xFFFFFFFF
    k = number * 0xCC9E2D51 & mask
    k = ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask
    h = 42 ^ k
    h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    h ^= 4
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def bucket_column(partitions: int) -> Column:
    """Return a Spark column with the bucket key of each row, computed from the row's column `partition`.

    `partitions` is the number of partitions of the topic.
    """
    keys = [F.lit(bucket_key(partition)) for partition in range(partitions)]
    return F.element_at(F.array(*keys), F.col("partition") + 1)
