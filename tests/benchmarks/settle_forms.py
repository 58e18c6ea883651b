"""The ways to run the fold in Spark that were compared before one was chosen: decision 0003.

Each takes the stream of Kafka records and gives ledger rows. `packed` is the one in jobs/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from jobs.settle_events import bucketed, settled_rows, worker_keyring
from jobs.settling.settling import in_order, settle_run
from jobs.spark.record_packing import from_cell, names_and_values, pack_records, records_of, to_cell
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.tables.ledger_arrow import ledger_batch
from schemas.tables.spark_types import PACKED_RECORDS, PACKED_ROWS, STREAM_ENTRIES, STREAM_KEY
from schemas.wire.record import Record
from tests.benchmarks.spark_append import LEDGER_SPARK, unpack_rows

_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(dict[str, bytes]).decode
_unpack_bucket: Final = msgspec.msgpack.Decoder(dict[bytes, dict[str, bytes]]).decode


def record_of(row: Any) -> Record:
    """The record in a row with RECORD_COLUMNS, as pandas or Spark hands it over."""
    usual = None if row.usual_headers is None else bytes(row.usual_headers)
    moment = int(pd.Timestamp(row.timestamp).value // 1000)
    key = None if row.key is None else bytes(row.key)
    value = None if row.value is None else bytes(row.value)
    headers = names_and_values(usual, row.odd_headers)
    return Record(row.topic, int(row.partition), int(row.offset), moment, key, value, *headers)


class _Settler(StatefulProcessor):
    def __init__(self, keyring_source: Callable[[], Keyring]) -> None:
        self._source = keyring_source
        self._keyring: Keyring | None = None

    def keyring(self) -> Keyring:
        if self._keyring is None:
            self._keyring = self._source()
        return self._keyring


class RowsPerBucket(_Settler):
    """Pandas form, a bucket a key, records as rows, MapState by its public calls."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._streams = handle.getMapState("streams", STREAM_KEY, STREAM_ENTRIES)

    def handleInputRows(  # type: ignore[override]  # frames, never rows
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        records = [record_of(row) for frame in rows for row in frame.itertuples(index=False)]
        records.sort(key=lambda record: record.offset)
        opened: dict[bytes | None, Entries] = {}
        for stream in {record.key for record in records if record.key}:
            found = self._streams.getValue((stream.decode(),))
            opened[stream] = Entries({} if found is None else _unpack(bytes(found[0])))
        settled = settle_run(records, opened, self.keyring())
        for name in {f"{row.stream_kind}/{row.stream_id}" for row in settled if row.entries}:
            self._streams.updateValue((name,), (_pack(opened[name.encode()].stored()),))
        yield pd.DataFrame({"rows": [to_cell(ledger_batch(settled))]})


class OneStream(_Settler):
    """A key per stream, ValueState; the pandas form and the Row form differ in what they hand over."""

    def __init__(self, keyring_source: Callable[[], Keyring], pandas: bool) -> None:
        super().__init__(keyring_source)
        self._pandas = pandas

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._entries = handle.getValueState("entries", STREAM_ENTRIES)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        if self._pandas:
            rows = (row for frame in rows for row in frame.itertuples(index=False))
        records = sorted((record_of(row) for row in rows), key=lambda record: record.offset)
        found = self._entries.get()
        entries = Entries({} if found is None else _unpack(bytes(found[0])))
        settled = settle_run(records, {record.key: entries for record in records}, self.keyring())
        if entries.stored():
            self._entries.update((_pack(entries.stored()),))
        cell = to_cell(ledger_batch(settled))
        yield pd.DataFrame({"rows": [cell]}) if self._pandas else Row(rows=cell)


_keyring: Keyring | None = None


def settle_blob(
    source: Callable[[], Keyring], key: Any, frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """applyInPandasWithState: packed records, all streams of a bucket in one blob."""
    global _keyring
    _keyring = _keyring or source()
    runs = [run for frame in frames for run in zip(frame["first_offset"], frame["records"], strict=True)]
    runs.sort(key=lambda run: run[0])
    records = [record for _, cell in runs for record in records_of(from_cell(cell))]
    in_order(records, -1)
    stored = _unpack_bucket(bytes(state.get[0])) if state.exists else {}
    opened = {record.key: Entries(stored.get(record.key or b"", {})) for record in records}
    settled = settle_run(records, opened, _keyring)
    stored.update(
        {stream: entries.stored() for stream, entries in opened.items() if stream and entries.stored()}
    )
    state.update((_pack(stored),))
    yield pd.DataFrame({"rows": [to_cell(ledger_batch(settled))]})


def build(form: str, records: DataFrame, settings: Settings) -> DataFrame:
    """The ledger rows of `records` by one form. Raises KeyError for a form that is none."""
    source = functools.partial(worker_keyring, settings.key_file)
    if form == "packed":
        rows = settled_rows(records, settings, source)
    elif form == "blob":
        packed = bucketed(records, settings).mapInArrow(pack_records, PACKED_RECORDS).groupBy("bucket")
        settle = functools.partial(settle_blob, source)
        rows = packed.applyInPandasWithState(settle, PACKED_ROWS, "blob binary", "append", "NoTimeout")
    else:
        processor, grouping, pandas = {
            "rows": (RowsPerBucket(source), "bucket", True),
            "stream_pandas": (OneStream(source, True), "key", True),
            "stream_row": (OneStream(source, False), "key", False),
        }[form]
        grouped = bucketed(records, settings).groupBy(grouping)
        run = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
        rows = run(processor, PACKED_ROWS, outputMode="Append", timeMode="None")
    return rows.mapInArrow(unpack_rows, LEDGER_SPARK)


FORMS: Final = ("packed", "rows", "stream_pandas", "stream_row", "blob")
