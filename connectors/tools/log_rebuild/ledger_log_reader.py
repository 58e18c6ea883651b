"""Reads the ledger as a log: each row is turned back into its Kafka record, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from connectors.log.ledger_files.ledger_reader import open_ledger
from schemas.keys.sealing import Keyring, UnsealError, sealed_by
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import RECORD_COLUMNS, rows_between
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER, LedgerRow, record_of_row
from schemas.wire.record import JSON_CONTENT, MAC_HEADERS, NOT_UTF8, STANDARD_HEADERS, Record
from trunkline_agent.errors import NotFound, Refused, TrunklineError

# The limit of one window: the sum of its values, and of the overhead of each row.
_WINDOW_BYTES: Final = 64 * 1024 * 1024
_ROW_BYTES: Final = 1024
_SCAN_ROWS: Final = 8_192
_GAPS_NAMED: Final = 5
_TIME, _CONTENT_TYPE = STANDARD_HEADERS.index("ce_time"), STANDARD_HEADERS.index("content-type")
_LOST: Final = (_TIME, _CONTENT_TYPE)


class LedgerRecord(NamedTuple):
    """A Kafka record that was made from a ledger row.

    Attributes:
        record: The record.
        is_whole: Whether all headers are the original ones. Otherwise the row lacks `ce_time` and
            `content-type`: the former is set to the log's time, the latter to the usual value.
    """

    record: Record
    is_whole: bool

    def is_same(self, found: Record) -> bool:
        """Return whether `found`, read from Kafka, is this record.

        Offset, Kafka's time, key, value and headers are compared. If `is_whole` is False, `ce_time` and
        `content-type` are not.
        """
        mine = (self.record.offset, self.record.logged_at_us)
        return mine == (found.offset, found.logged_at_us) and self.is_same_content(found)

    def is_same_content(self, found: Record) -> bool:
        """Return whether `found`, read from Kafka, has this record's key, value and headers.

        Offset and Kafka's time are not compared. If `is_whole` is False, `ce_time` and `content-type` are not
        either.
        """
        mine, is_whole = self.record, self.is_whole
        if (mine.key, mine.value) != (found.key, found.value):
            return False
        return _headers(mine, is_whole) == _headers(found, is_whole)


def _headers(record: Record, is_whole: bool) -> object:
    names, values = record.header_names, record.header_values
    if names in (STANDARD_HEADERS, MAC_HEADERS):
        return values if is_whole else tuple([one for at, one in enumerate(values) if at not in _LOST])
    # As `read_envelope` reads names: they end at the first NUL, and bytes that are not UTF-8 are unknown.
    names = tuple([name.partition("\0")[0] for name in names])
    return NOT_UTF8 if any(NOT_UTF8 in name for name in names) else (names, values)


class LedgerLog:
    """All records of the ledger at its newest version.

    The constructor reads every row once. The object keeps 5 bytes of memory for each row.

    Attributes:
        path: The path or URI of the ledger.
        version: The ledger's version.
        ends: The first offset of each partition that is not in the ledger.
        bytes: The size of all values together.

    Raises:
        NotFound: There is no ledger, or it has no rows.
        Refused: No log can be made of the ledger. It has rows of another topic, a missing or repeated offset,
            or a value sealed under a master key that `keyring` lacks.
    """

    def __init__(self, settings: Settings, keyring: Keyring) -> None:
        self._keyring = keyring
        self._topic = settings.kafka.topic
        self.path = settings.table_path(LEDGER)
        table = open_ledger(self.path, ": set data_dir to where it is")
        self.version = int(table.version())
        self._dataset = dataset_of(table)
        self.bytes = 0
        self._sizes: dict[int, _Sizes] = {}
        self._scan()
        self.ends = {number: sizes.end for number, sizes in sorted(self._sizes.items())}
        if not self.ends:
            raise NotFound(f"the ledger at {self.path} has no rows: there is nothing to make a log of")
        gaps = [gap for number, sizes in sorted(self._sizes.items()) for gap in sizes.gaps(number)]
        if gaps:
            more = f" and {len(gaps) - _GAPS_NAMED} more" if len(gaps) > _GAPS_NAMED else ""
            raise Refused(
                f"the ledger at {self.path} does not have every record once: {'; '.join(gaps[:_GAPS_NAMED])}"
                f"{more}. A log with the same offsets cannot be made of it: put the ledger back from a copy, "
                "then run this again. Nothing was changed"
            )

    @property
    def count(self) -> int:
        """The number of records in the ledger."""
        return sum(self.ends.values())

    def windows(self, partition: int, first: int = 0, end: int | None = None) -> Iterator[list[LedgerRecord]]:
        """Yield the records of one partition in the order of their offsets, in lists that fit into memory.

        A list has at most 64 MiB of values, or a single record. A partition without rows yields no list.

        Args:
            partition: The Kafka partition.
            first: The first offset.
            end: The offset after the last one. None: the ledger's end.

        Raises:
            TrunklineError: A row cannot be turned back into a record.
        """
        if partition not in self._sizes:
            return
        for begin, stop in self._sizes[partition].windows(first, self.ends[partition] if end is None else end):
            rows = rows_between(self._dataset, partition, begin, stop, RECORD_COLUMNS)
            yield [self._record(row) for row in rows]

    def _record(self, row: LedgerRow) -> LedgerRecord:
        try:
            record = record_of_row(row, self._keyring)
        except (UnsealError, ValueError) as error:
            raise TrunklineError(
                f"the record at {row.partition}/{row.offset} cannot be made of its ledger row: {error}; "
                "'./trunkline audit verify' says whether the row was changed"
            ) from error
        if row.wire is not None:
            return LedgerRecord(record, True)
        moment = datetime.fromtimestamp(row.logged_at / 1e6, UTC).isoformat(timespec="milliseconds")
        values = list(record.header_values)
        values[_TIME] = moment.replace("+00:00", "Z").encode()
        values[_CONTENT_TYPE] = JSON_CONTENT.encode()
        return LedgerRecord(msgspec.structs.replace(record, header_values=tuple(values)), False)

    def _scan(self) -> None:
        columns = ["topic", "partition", "offset", "value", "value_sealed"]
        foreign: set[str] = set()
        locked: dict[str, int] = {}
        batches = self._dataset.to_batches(
            columns=columns, batch_size=_SCAN_ROWS, batch_readahead=2, fragment_readahead=1
        )
        for batch in batches:
            foreign |= set(pc.unique(batch.column("topic")).to_pylist()) - {self._topic}
            for sealed in batch.column("value_sealed").drop_null().to_pylist():
                if (key := sealed_by(sealed)) not in self._keyring.ids:
                    locked[key] = locked.get(key, 0) + 1
            self._take(batch)
        if foreign:
            raise Refused(
                f"the ledger at {self.path} holds records of topic {sorted(foreign)[0]!r}, kafka.topic is "
                f"{self._topic!r}: set kafka.topic to the ledger's. Nothing was changed"
            )
        if locked:
            keys = ", ".join(f"{key[:32]!r} ({count} records)" for key, count in sorted(locked.items()))
            raise Refused(
                f"master keys are missing, without which masked values cannot be opened: {keys}. Put the key "
                "file back from your copy (master_key_file), then run this again. Nothing was changed"
            )

    def _take(self, batch: pa.RecordBatch) -> None:
        values = _lengths(batch.column("value"))
        self.bytes += int(values.sum())
        sizes = values + _lengths(batch.column("value_sealed"))
        partitions = batch.column("partition").to_numpy(zero_copy_only=False)
        offsets = batch.column("offset").to_numpy(zero_copy_only=False)
        for number in np.unique(partitions).tolist():
            mine = partitions == number
            self._sizes.setdefault(number, _Sizes()).add(offsets[mine], sizes[mine])


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    return found.astype(np.int64)


class _Sizes:
    """The size of the row of each offset of a partition, and how many rows there are of each."""

    def __init__(self) -> None:
        self._sizes = np.zeros(1024, dtype=np.uint32)
        self._times = np.zeros(1024, dtype=np.uint8)
        self.end = 0

    def add(self, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        last = int(offsets.max())
        if last >= len(self._sizes):
            room = max(last + 1, 2 * len(self._sizes)) - len(self._sizes)
            self._sizes = np.pad(self._sizes, (0, room))
            self._times = np.pad(self._times, (0, room))
        self.end = max(self.end, last + 1)
        self._sizes[offsets] = sizes
        there, counts = np.unique(offsets, return_counts=True)
        # Any number above two counts as two.
        self._times[there] = np.minimum(self._times[there] + counts, 2)

    def gaps(self, partition: int) -> Iterator[str]:
        """Yield texts about the runs of offsets that are missing or repeated."""
        times = self._times[: self.end]
        for wrong, text in ((0, "missing"), (2, "there twice")):
            edges = np.flatnonzero(np.diff(np.concatenate(([0], times == wrong, [0]))))
            for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                named = f"offset {first} is" if end == first + 1 else f"offsets {first} to {end - 1} are"
                yield f"{named} {text} in partition {partition}"

    def windows(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut the offsets from `first` to before `end` into windows."""
        while first < end:
            most = min(end, first + _WINDOW_BYTES // _ROW_BYTES)
            sizes = np.cumsum(self._sizes[first:most].astype(np.int64) + _ROW_BYTES)
            stop = first + max(1, int(np.searchsorted(sizes, _WINDOW_BYTES)))
            yield first, min(stop, end)
            first = stop
