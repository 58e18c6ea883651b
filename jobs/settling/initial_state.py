"""Makes the settling job's initial state for a new checkpoint from the table `stream_entries`.

A cell is msgpack. It has some streams of one bucket with all their entries, and the bucket's last offset. A
cell has thousands of streams, because Spark handles rows one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql import functions as F

from jobs.views.buckets import bucket_column, bucket_key

_CELL_BYTES: Final = 4 * 1024 * 1024
_PACKED: Final = "bucket int not null, state binary not null"


class BucketShare(msgspec.Struct, frozen=True, array_like=True):
    """The content of one packed cell: some streams of a bucket with all their entries.

    `streams` maps each stream to its entries. Every cell of a bucket has the bucket's last settled offset.
    """

    last_offset: int
    streams: dict[str, dict[str, bytes]]


_encode: Final = msgspec.msgpack.Encoder().encode
unpack_share: Final = msgspec.msgpack.Decoder(BucketShare).decode


def initial_state(entries: DataFrame, next_offsets: Mapping[int, int], partitions: int) -> GroupedData:
    """Return the state of all buckets, grouped by `bucket`, as the initial state for `transformWithState`.

    Args:
        entries: The table `stream_entries`.
        next_offsets: The first unsettled offset of each Kafka partition; 0 for partitions that are not named.
        partitions: The number of the topic's partitions.
    """
    last = {bucket_key(partition): offset - 1 for partition, offset in next_offsets.items() if offset > 0}
    # A bucket without streams may have settled records, if all of them were rejected.
    bare = entries.sparkSession.createDataFrame(
        [(bucket, bytearray(_encode(BucketShare(offset, {})))) for bucket, offset in last.items()], _PACKED
    )
    packed = (
        entries.select(
            bucket_column(partitions).alias("bucket"),
            F.concat_ws("/", "stream_kind", "stream_id").alias("stream"),
            "entry",
            "value",
        )
        .repartition("bucket")
        .sortWithinPartitions("bucket", "stream")
        .mapInArrow(functools.partial(pack_streams, last), _PACKED)
    )
    return bare.unionAll(packed).groupBy("bucket")


def pack_streams(
    last_offsets: Mapping[int, int], batches: Iterable[pa.RecordBatch], cell_bytes: int = _CELL_BYTES
) -> Iterator[pa.RecordBatch]:
    """Pack stream entries into cells of whole streams, each a BucketShare. Spark's `mapInArrow` calls this.

    Args:
        last_offsets: The last settled offset of each bucket.
        batches: Rows with the columns `bucket`, `stream`, `entry` and `value`, sorted by the first two.
        cell_bytes: A cell ends with the stream that reaches this size.

    Yields:
        Rows with the columns `bucket` and `state`, the packed cell.
    """
    streams: dict[str, dict[str, bytes]] = {}
    bucket, size = -1, 0
    for of_bucket, stream, entry, value in _rows(batches):
        if streams and (of_bucket != bucket or (size >= cell_bytes and stream not in streams)):
            yield _cell(bucket, BucketShare(last_offsets[bucket], streams))
            streams, size = {}, 0
        bucket = of_bucket
        streams.setdefault(stream, {})[entry] = value
        size += len(stream) + len(entry) + len(value)
    if streams:
        yield _cell(bucket, BucketShare(last_offsets[bucket], streams))


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, str, str, bytes]]:
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("bucket", "stream", "entry", "value"))
        yield from zip(*columns, strict=True)


def _cell(bucket: int, share: BucketShare) -> pa.RecordBatch:
    arrays = [pa.array([bucket], pa.int32()), pa.array([_encode(share)], pa.binary())]
    return pa.RecordBatch.from_arrays(arrays, names=["bucket", "state"])
