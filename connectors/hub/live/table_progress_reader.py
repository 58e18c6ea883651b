"""The progress of ledger and views: up to which offset the tables have the log's records, and their lag.

Each commit of the ledger carries an entry of the audit chain, which names the next offset of each partition
(decision 0020). It also carries the duration of the micro-batch. Commits of `stream_entries` carry the views'
progress. Both readers follow the log of their table, so that a call reads one or two small files.

The lag of a table is how many records it lacks, and the age of the oldest of these.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import orjson
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow.fs import FileSystem

from connectors.hub.live.live_view import LiveView
from schemas.integrity.audit_anchors import chain_file
from schemas.integrity.audit_chain import ChainEntry, last_in_file, line_in_metadata
from schemas.settings.settings import Settings
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import ViewProgress, read_progress
from schemas.wire.record import Position
from trunkline_agent.errors import TrunklineError

# Maintenance commits a few times between two micro-batches. Older entries are in the chain file.
_LOOK_BACK: Final = 50


class LedgerProgress(msgspec.Struct, frozen=True):
    """The progress of the ledger.

    Attributes:
        ends: The offset of the first record that is not in the ledger, by partition; empty for an empty ledger.
        rows: The number of rows that the audit chain covers.
        committed_at_s: Commit time of the newest micro-batch, in seconds since 1970 UTC; None if unknown.
        batch_s: Duration of the newest micro-batch in seconds; None if unknown.
        batch_rows: Rows of the newest micro-batch; None if unknown.
    """

    ends: dict[int, int]
    rows: int = 0
    committed_at_s: float | None = None
    batch_s: float | None = None
    batch_rows: int | None = None


class _Batch(msgspec.Struct):
    # A part of the commit's metadata that jobs/settling/ledger_sink.py writes. Older commits lack it.
    batch_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Followed:
    """A table that is opened once and then updated by its log."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._table: DeltaTable | None = None

    def newest(self) -> DeltaTable | None:
        """Return the table at its newest version, None while there is none. Raises TrunklineError."""
        try:
            # An open table that has been removed has no newer version, and would stay as it was.
            if "://" not in self._path and not Path(self._path, "_delta_log").is_dir():
                self._table = None
            # `is_deltatable` keeps Python's global lock, so a store that hangs would stop the program.
            elif self._table is None:
                self._table = DeltaTable(self._path)
            else:
                self._table.update_incremental()
            return self._table
        except TableNotFoundError:
            return None
        except (DeltaError, OSError, pa.ArrowException) as error:
            # The tables are being swapped for rebuilt ones, or cleaned up. The next call opens the table again.
            self._table = None
            raise TrunklineError(f"the table at {self._path} cannot be read: {error}") from error


class LedgerProgressReader:
    """A reader of the ledger's progress, which keeps the table open between calls. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._path = settings.table_path(LEDGER)
        self._followed = _Followed(self._path)
        self._known: tuple[int, LedgerProgress] | None = None

    def read(self) -> LedgerProgress | None:
        """Return the ledger's current progress, or None while there is no ledger.

        Raises TrunklineError if the ledger's Delta log cannot be read. The next call may succeed.
        """
        table = self._followed.newest()
        if table is None:
            self._known = None
            return None
        version = table.version()
        try:
            found = self._newest_batch(table_storage(self._path), version)
        except OSError as error:
            raise TrunklineError(f"the log of {self._path} cannot be read: {error}") from error
        progress = self._without_a_commit(table) if found is None else found
        self._known = (version, progress)
        return progress

    def _newest_batch(self, storage: FileSystem, version: int) -> LedgerProgress | None:
        seen, known = (-1, None) if self._known is None else self._known
        if seen > version:
            # The ledger was created again.
            seen, known = -1, None
        for number in range(version, max(seen, version - _LOOK_BACK), -1):
            found = _batch_in_commit(storage, number)
            if found is not None:
                return found
        return known

    def _without_a_commit(self, table: DeltaTable) -> LedgerProgress:
        """Return the progress by the chain file, for a log that has only commits of maintenance."""
        line = last_in_file(chain_file(self._settings, str(table.metadata().id)))
        if line is not None:
            return LedgerProgress(dict(line.entry.ends), line.entry.rows)
        if pa.table(table.get_add_actions()).num_rows:
            raise TrunklineError(
                f"no commit of {self._path} says how far it is: it is older than its audit chain"
            )
        return LedgerProgress({})


class ViewProgressReader:
    """A reader of the view tables' progress, which keeps a table open between calls. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._followed = _Followed(settings.table_path(STREAM_ENTRIES))

    def read(self) -> ViewProgress | None:
        """Return the current progress of the view tables, or None while there are no view tables.

        Raises TrunklineError if the table `stream_entries` cannot be read. The next call may succeed.
        """
        table = self._followed.newest()
        return None if table is None else read_progress(table)


def _batch_in_commit(storage: FileSystem, version: int) -> LedgerProgress | None:
    """Return the progress by one commit; None if it is of maintenance or was removed from the log."""
    try:
        with storage.open_input_stream(f"_delta_log/{version:020d}.json") as stream:
            actions = [orjson.loads(text) for text in stream.read().splitlines() if text]
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    for action in actions:
        info: Any = action.get("commitInfo") if isinstance(action, dict) else None
        text: Any = info.get("userMetadata") if isinstance(info, dict) else None
        line = line_in_metadata(text, version) if isinstance(text, str) else None
        if line is not None:
            return _progress(line.entry, info, text)
    return None


def _progress(entry: ChainEntry, info: dict[str, Any], text: str) -> LedgerProgress:
    try:
        batch_ms = msgspec.json.decode(text, type=_Batch).batch_ms
    except msgspec.MsgspecError:
        batch_ms = None
    at_ms = info.get("timestamp")
    return LedgerProgress(
        dict(entry.ends),
        entry.rows,
        at_ms / 1000 if isinstance(at_ms, int) else None,
        None if batch_ms is None else batch_ms / 1000,
        sum(partition.rows for partition in entry.partitions),
    )


# The number of looks to remember. A table may be further behind than the oldest of them.
_LOOKS: Final = 600


class Lag(NamedTuple):
    """The number of `records` that a table lacks, by partition, and the age in `seconds` of the oldest."""

    records: dict[int, int]
    seconds: float


class TableLag:
    """A comparison of a table's progress with the end of the log. Not thread-safe.

    Call `look` regularly with the log's end. `behind` compares a table with the end given last. From the ends
    given before, it finds out how old the missing records are.
    """

    def __init__(self, live_view: LiveView) -> None:
        self._live_view = live_view
        self._looks: deque[tuple[float, dict[int, int]]] = deque(maxlen=_LOOKS)

    def look(self, ends: Mapping[int, int]) -> None:
        """Remember the current end of the log with the time of this call.

        Args:
            ends: The offset after the last record to compare with, by partition: that of the log's last record,
                or of the last one that the gateway has settled.
        """
        self._looks.append((time.time(), dict(ends)))

    def behind(self, offsets: Mapping[int, int]) -> Lag:
        """Return the lag of a table behind the end given to the last call of `look`; no lag before the first.

        Args:
            offsets: The first offset that the table lacks, by partition, such as `LedgerProgress.ends`. A
                missing partition counts as 0.
        """
        now, ends = self._looks[-1] if self._looks else (time.time(), {})
        missing = {partition: max(0, end - offsets.get(partition, 0)) for partition, end in ends.items()}
        since = [self._missing_since(p, offsets.get(p, 0), now) for p, count in missing.items() if count]
        return Lag(missing, max((now - moment for moment in since), default=0.0))

    def _missing_since(self, partition: int, offset: int, now: float) -> float:
        """Return when the record was logged, by Kafka's clock, or first seen if it is not in memory."""
        found = self._live_view.feed.find(Position(partition, offset))
        if found is not None:
            return min(now, found.logged_at_us / 1e6)
        return next((moment for moment, ends in self._looks if ends.get(partition, 0) > offset), now)
