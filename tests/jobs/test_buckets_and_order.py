"""Where a bucket's state lies, and the guard against records that come out of order."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.settling.settling import OrderError, in_order, unpack_runs
from jobs.spark.record_packing import RECORD_COLUMNS, to_cell
from jobs.views.buckets import bucket_key, spark_hash
from schemas.wire.record import Record


def record(offset: int) -> Record:
    """A record of which only the offset counts."""
    return Record("t", 0, offset, 0, None, None, (), ())


def test_our_hash_is_sparks(spark: SparkSession) -> None:
    numbers = [0, 1, 2, 63, 64, 1024, 65_535, 2**31 - 1]
    frame = spark.createDataFrame([(n,) for n in numbers], "n int").select(F.hash("n").alias("h"))
    assert [row.h & 0xFFFFFFFF for row in frame.collect()] == [spark_hash(n) for n in numbers]


@pytest.mark.parametrize(("partitions", "shuffle_partitions"), [(4, 2), (8, 4), (64, 16), (2, 2)])
def test_buckets_spread_evenly_over_the_shuffle_partitions(partitions: int, shuffle_partitions: int) -> None:
    keys = [bucket_key(number) for number in range(partitions)]
    assert len(set(keys)) == partitions
    shares = Counter(spark_hash(key) % shuffle_partitions for key in keys)
    assert set(shares.values()) == {partitions // shuffle_partitions}


def test_the_keys_are_the_ones_that_checkpoints_hold() -> None:
    assert [bucket_key(number) for number in range(4)] == [38, 1025, 2055, 3089]


@pytest.mark.parametrize(("offsets", "last"), [([5, 7, 6], 4), ([5, 5], 4), ([4, 5], 4)])
def test_going_backwards_stops_the_batch(offsets: list[int], last: int) -> None:
    with pytest.raises(OrderError, match="offset"):
        in_order([record(offset) for offset in offsets], last)


def test_runs_that_spark_hands_over_in_any_order_are_settled_by_offset() -> None:
    def run(first: int) -> bytes:
        columns = dict.fromkeys(RECORD_COLUMNS, pa.array([None, None], pa.binary()))
        columns |= {"topic": pa.array(["t", "t"]), "partition": pa.array([0, 0], pa.int32())}
        columns |= {"offset": pa.array([first, first + 1]), "odd_headers": pa.array([None, None], pa.string())}
        columns["timestamp"] = pa.array([0, 0], pa.timestamp("us", tz="UTC"))
        return to_cell(pa.RecordBatch.from_pydict(columns))

    frames = [
        pd.DataFrame({"first_offset": [4, 0], "records": [run(4), run(0)]}),
        pd.DataFrame({"first_offset": [2], "records": [run(2)]}),
    ]
    assert [record.offset for record in unpack_runs(frames)] == [0, 1, 2, 3, 4, 5]


def test_gaps_are_no_disorder() -> None:
    assert in_order([record(3), record(9)], 2) == 9
