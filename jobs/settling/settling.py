"""The fold as a stateful operator: `transformWithState` over buckets of streams, with packed records.

A bucket is one Kafka partition of the topic, so all records of a stream are in one bucket, in the order of
their offsets. Spark groups records but does not sort them. So the processor sorts the packed runs, and refuses
offsets that do not rise, also compared with earlier micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.settling.initial_state import unpack_share
from jobs.settling.stream_state import StreamState
from jobs.spark.record_packing import from_cell, keep_modules, records_of, to_cell
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring
from schemas.streams.fold import settle
from schemas.streams.mailboxes.mailbox_entries import expected_apart
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.tables.ledger_arrow import ledger_batch
from schemas.tables.spark_types import BUCKET_STATE, STREAM_ENTRIES, STREAM_KEY
from schemas.wire.ids import parse_stream_key
from schemas.wire.record import Record
from schemas.wire.verdicts import ACCEPTED

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import TimerValues

ROWS_PER_CELL = 20_000


class OrderError(Exception):
    """Records of one bucket came out of order or twice within one query. The query must stop."""


def unpack_runs(frames: Iterable[pd.DataFrame]) -> list[Record]:
    """Return one bucket's Kafka records of a micro-batch, in the order of their offsets.

    Args:
        frames: Rows in any order. The column `records` has a run of records as an Arrow IPC stream, and
            `first_offset` the offset of the first one.
    """
    runs = [run for frame in frames for run in zip(frame["first_offset"], frame["records"], strict=True)]
    runs.sort(key=lambda run: run[0])
    with _no_collection():
        return [record for _, cell in runs for record in records_of(from_cell(cell))]


def in_order(records: list[Record], last_offset: int) -> int:
    """Check that the offsets of `records` rise and are all above `last_offset`, and return the last of them.

    Without records, the result is `last_offset`.

    Raises:
        OrderError: An offset does not rise.
    """
    for record in records:
        if record.offset <= last_offset:
            raise OrderError(
                f"{record.topic}-{record.partition}: offset {record.offset} after {last_offset}; the "
                "micro-batch was not settled. If the topic was made anew, the checkpoint must be, too."
            )
        last_offset = record.offset
    return last_offset


def settle_run(
    records: list[Record],
    entries: Mapping[bytes | None, Entries],
    keyring: Keyring,
) -> list[LedgerRow]:
    """Settle the records of one bucket in a micro-batch, and return their ledger rows in the same order.

    The last row of each stream contains all changes of the micro-batch to the stream state and to view rows.

    Args:
        records: The records, in the order of their offsets.
        entries: The stream state for each record key. The key of every record must be in it. The states are
            updated.
        keyring: The master keys for secrets in records.
    """
    last = {record.key: position for position, record in enumerate(records)}
    changes: dict[bytes | None, dict[tuple[str, str], AppliedChange]] = {}
    accepted: dict[bytes | None, int] = {}
    rows = []
    with _no_collection():
        for position, record in enumerate(records):
            stream = entries[record.key]
            settled = settle(record, stream, keyring)
            if settled.verdict == ACCEPTED:
                accepted[record.key] = record.offset
            for change in settled.changes:
                applied = AppliedChange(change.view, change.key, record.offset, change.row)
                changes.setdefault(record.key, {})[change.view, change.key] = applied
            if last[record.key] == position:
                changed = changes.pop(record.key, {}).values()
                writes, offset = stream.take_writes(), accepted.get(record.key)
                rows.append(ledger_row(record, settled, keyring, changed, writes, offset))
            else:
                rows.append(ledger_row(record, settled, keyring))
    return rows


@contextmanager
def _no_collection() -> Iterator[None]:
    # The many rows of a run have no cycles, but the collector would scan them again and again. That took a
    # third of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class SettleStreams(StatefulProcessor):
    """The stateful operator that settles the records of one bucket in each micro-batch.

    Args:
        keyring_source: Returns the master keys. Each worker process calls it once, so that no key is part of a
            task that Spark serializes.
    """

    def __init__(self, keyring_source: Callable[[], Keyring]) -> None:
        self._keyring_source = keyring_source
        self._keyring: Keyring | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state in Spark's state store: each stream's entries, and the bucket's last offset.

        Spark calls it once, before the first records. `handle` is Spark's access to the state store.
        """
        self._streams = StreamState(handle.getMapState("streams", STREAM_KEY, STREAM_ENTRIES))
        self._bucket = handle.getValueState("bucket", BUCKET_STATE)

    def handleInputRows(  # type: ignore[override]  # noqa: N802  Spark's name; frames, never rows
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Settle one bucket's records of a micro-batch, and yield frames with packed ledger rows.

        Spark calls it. The state is updated before the first frame. Raises OrderError if offsets do not rise.

        Args:
            key: The bucket's key, not used.
            rows: Frames of packed records, for `unpack_runs`.
            timerValues: Spark's clock, not used.

        Yields:
            Frames with the column `rows`. Each cell has ledger rows as an Arrow IPC stream.
        """
        if self._keyring is None:
            self._keyring = self._keyring_source()
        records = unpack_runs(rows)
        seen = self._bucket.get()
        last_offset = in_order(records, -1 if seen is None else seen[0])
        opened = self._open(records)
        settled = settle_run(records, opened, self._keyring)
        self._streams.store({_stream(row): opened[_key(row)].stored() for row in settled if row.entries})
        self._bucket.update((last_offset,))
        for start in range(0, len(settled), ROWS_PER_CELL):
            batch = ledger_batch(settled[start : start + ROWS_PER_CELL])
            yield pd.DataFrame({"rows": [to_cell(batch)]})
        keep_modules("settle")

    def handleInitialState(  # noqa: N802  Spark's name
        self,
        key: Any,
        initialState: pd.DataFrame,  # type: ignore[override]  # noqa: N803
        timerValues: TimerValues,  # noqa: N803
    ) -> None:
        """Store the state of the bucket's streams in a new checkpoint, before the bucket's first record.

        Spark calls it only in the first micro-batch of a recovery from the tables.

        Args:
            key: The bucket's key, not used.
            initialState: Packed cells of `initial_state`.
            timerValues: Spark's clock, not used.
        """
        for cell in initialState["state"]:
            share = unpack_share(cell)
            self._streams.store(share.streams)
            self._bucket.update((share.last_offset,))

    def _open(self, records: list[Record]) -> dict[bytes | None, Entries]:
        """Return the entries of every key among `records`; a key that names no stream has none."""
        keys = list(dict.fromkeys(record.key for record in records))
        named = {key: key.decode("ascii") for key in keys if key and parse_stream_key(key)}
        stored = self._streams.load(list(named.values()))
        # Requested together, because each single request would wait for an answer of the JVM.
        expected = ((named[record.key], expected_apart(record)) for record in records if record.key in named)
        apart = self._streams.load_apart(list(dict.fromkeys((s, key) for s, keys in expected for key in keys)))

        def fetching(stream: str) -> Callable[[str], bytes | None]:
            def fetch(key: str) -> bytes | None:
                if (stream, key) not in apart:
                    apart.update(self._streams.load_apart([(stream, key)]))
                return apart[stream, key]

            return fetch

        return {
            key: Entries(stored[named[key]], fetching(named[key])) if key in named else Entries()
            for key in keys
        }


def _stream(row: LedgerRow) -> str:
    return f"{row.stream_kind}/{row.stream_id}"


def _key(row: LedgerRow) -> bytes:
    return _stream(row).encode("ascii")
