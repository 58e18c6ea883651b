"""The partition of a key is the one that Kafka's own clients choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2

from schemas.wire.record import partition_for


@pytest.mark.parametrize(
    ("key", "java_hash"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_a_key_lies_in_the_partition_that_java_chooses(key: bytes, java_hash: int) -> None:
    for partitions in (1, 4, 7, 1024):
        assert partition_for(key, partitions) == (java_hash & 0x7FFFFFFF) % partitions


@given(st.binary(max_size=400), st.integers(1, 1000))
def test_any_key_lies_where_kafkas_python_client_puts_it(key: bytes, partitions: int) -> None:
    assert partition_for(key, partitions) == (murmur2(key) & 0x7FFFFFFF) % partitions
