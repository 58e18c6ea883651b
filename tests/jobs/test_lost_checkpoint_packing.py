"""How the streams of `stream_entries` become cells of the initial state."""

from __future__ import annotations

import pyarrow as pa

from jobs.settling.initial_state import BucketShare, pack_streams, unpack_share

Row = tuple[int, str, str, bytes]


def cells(rows: list[Row], batch_rows: int, cell_bytes: int) -> list[tuple[int, BucketShare]]:
    """The cells of `rows`, which Spark hands over `batch_rows` at a time."""
    names = ("bucket", "stream", "entry", "value")
    batches = [
        pa.RecordBatch.from_pydict(
            dict(zip(names, zip(*rows[start : start + batch_rows], strict=True), strict=True))
        )
        for start in range(0, len(rows), batch_rows)
    ]
    packed = [batch.to_pylist()[0] for batch in pack_streams({38: 9, 1025: 4}, batches, cell_bytes)]
    return [(row["bucket"], unpack_share(row["state"])) for row in packed]


ROWS: list[Row] = [
    (38, "job/a", "job", b"1"),
    (38, "job/a", "progress", b"2"),
    (38, "job/b", "job", b"3"),
    (1025, "job/c", "job", b"4"),
]


def test_a_cell_holds_whole_streams_of_one_bucket_wherever_spark_cuts_its_batches() -> None:
    for batch_rows in (1, 2, 3, 4):
        assert cells(ROWS, batch_rows, 1_000_000) == [
            (38, BucketShare(9, {"job/a": {"job": b"1", "progress": b"2"}, "job/b": {"job": b"3"}})),
            (1025, BucketShare(4, {"job/c": {"job": b"4"}})),
        ]


def test_a_full_cell_ends_at_the_end_of_a_stream() -> None:
    assert [share.streams for _, share in cells(ROWS, 2, 1)] == [
        {"job/a": {"job": b"1", "progress": b"2"}},
        {"job/b": {"job": b"3"}},
        {"job/c": {"job": b"4"}},
    ]
    assert cells([], 1, 1) == []
