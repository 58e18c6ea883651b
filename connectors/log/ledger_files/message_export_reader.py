"""Exports all messages into one Parquet file (AM-07), by command and every hour, for DuckDB and the like.

**Reads** the Delta tables `mailbox` and `message_bodies`. **Owns** `agent_mcp.export_file`.
**Guarantees** that the file is whole: it is written under another name and then renamed, or uploaded. Each
gateway writes the file when it is older than `agent_mcp.export_interval_ms`. If two gateways write at once, the
later file stays.
**On restart** the age of the file decides as before.

Each table is read at one version, `mailbox` first. A body is written before its row in `mailbox`, so every
message has one. Memory is bounded by `_MESSAGES_AT_ONCE` rows without bodies and a few batches of bodies. For
each such group of rows, all bodies are read once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from connectors.plumbing.machine.background_service import ThreadedService
from connectors.plumbing.network.rates import retry
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.mailboxes.message import CLAIMED, MAILBOX_VIEW, MESSAGE_BODIES, READ
from schemas.tables.delta_files import reason_of, small_batches
from trunkline_agent.errors import NotFound, TrunklineError, UsageError
from trunkline_agent.wire.moments import is_utc_timestamp

_KEY: Final = ["realm", "recipient", "message_id"]
_HEAD: Final = [*_KEY, "sender", "priority", "status", "posted_at", "sent_at"]
_MESSAGES_AT_ONCE: Final = 250_000
# A body has up to a mebibyte, so few are decoded at once. Small batches are joined again.
_ROWS_DECODED: Final = 32
_HEADS_DECODED: Final = 16_384
_ROWS_JOINED: Final = 65_536
_BYTES_JOINED: Final = 32 * 1024 * 1024
_MOMENT: Final = pa.timestamp("us", tz="UTC")

# Required columns are also required in the file, so that readers can rely on them.
EXPORT_SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("from_agent", pa.string(), nullable=False),
        pa.field("to_agent", pa.string(), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("read", pa.bool_(), nullable=False),
        pa.field("priority", pa.string(), nullable=False),
        pa.field("created_at", _MOMENT),
    ]
)


class TablesUnread(TrunklineError):
    """The tables could not be read, because maintenance or a rebuild removed files. A retry can succeed."""


def _exported_messages(settings: Settings) -> Iterator[pa.Table]:
    """Yield all messages of all mailboxes as Arrow tables, in no particular order.

    The columns are those of EXPORT_SCHEMA: id, sender, recipient, content, times, and whether the message was
    read. Messages that Spark has not settled yet are absent, because only the Delta tables are read.

    Raises:
        NotFound: There are no tables yet.
        TablesUnread: The tables cannot be read now.
        TrunklineError: A message has no body.
    """
    try:
        yield from _read(settings)
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise TablesUnread(f"the messages below {settings.tables_root} cannot be read: {error}") from error


def _read(settings: Settings) -> Iterator[pa.Table]:
    paths = [settings.table_path(name) for name in (MAILBOX_VIEW, MESSAGE_BODIES)]
    if not all(DeltaTable.is_deltatable(path) for path in paths):
        raise NotFound(
            f"there are no messages in the tables below {settings.tables_root} yet: they appear with the first "
            "message that 'streams' has settled"
        )
    mailbox, bodies = (DeltaTable(path) for path in paths)
    for heads in joined(_tables(mailbox, _HEAD, _HEADS_DECODED), _MESSAGES_AT_ONCE):
        keys, found = _keys(heads), 0
        found_bodies = _tables(bodies, [*_KEY, "body"], _ROWS_DECODED)
        for part in joined(found_bodies, _ROWS_JOINED, _BYTES_JOINED):
            # The index in `heads` of the message of each body, null if it is not among them.
            places = pc.index_in(_keys(part), value_set=keys)
            wanted = places.is_valid()
            places = places.filter(wanted)
            if len(places):
                found += len(places)
                yield _rows(heads.take(places), part["body"].filter(wanted))
        if found != heads.num_rows:
            raise TrunklineError(
                f"{heads.num_rows - found} messages have no body below {settings.tables_root}; "
                "rebuild_views makes the tables anew from the ledger"
            )


def joined(parts: Iterable[pa.Table], rows_most: int, bytes_most: float = inf) -> Iterator[pa.Table]:
    """Join successive small tables into larger ones, and yield each.

    A table is yielded when it has at least `rows_most` rows or `bytes_most` bytes. The last one may be smaller.
    """
    held: list[pa.Table] = []
    rows = size = 0
    for part in parts:
        held.append(part)
        rows, size = rows + part.num_rows, size + part.nbytes
        if rows >= rows_most or size >= bytes_most:
            yield pa.concat_tables(held)
            held, rows, size = [], 0, 0
    if rows:
        yield pa.concat_tables(held)


def _tables(table: DeltaTable, columns: list[str], decoded: int) -> Iterator[pa.Table]:
    return (pa.Table.from_batches([batch]) for batch in small_batches(table, columns, decoded))


def _keys(table: pa.Table) -> pa.Array:
    """Return one text for each row; no part of a key contains a slash."""
    keys = pc.binary_join_element_wise(*(table[name].cast(pa.string()) for name in _KEY), "/")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _rows(heads: pa.Table, bodies: pa.ChunkedArray) -> pa.Table:
    posted_us = heads["posted_at"].cast(_MOMENT).cast(pa.int64())
    columns = [
        heads["message_id"],
        heads["sender"],
        heads["recipient"],
        bodies,
        pc.divide(posted_us, 1000),
        pc.is_in(heads["status"], value_set=pa.array([READ, CLAIMED], heads["status"].type)),
        heads["priority"],
        pa.array(map(_moment, heads["sent_at"].to_pylist()), _MOMENT),
    ]
    typed = [
        column.cast(field.type) if column.type != field.type else column
        for column, field in zip(columns, EXPORT_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(typed, schema=EXPORT_SCHEMA)


def _moment(said: str | None) -> datetime | None:
    """Return the sending time that the sender claims, or None if it is no time in UTC."""
    # More than six digits of a fraction are cut off.
    return None if said is None or not is_utc_timestamp(said) else datetime.fromisoformat(said)


log = structlog.stdlib.get_logger(__name__)

FILE_NAME: Final = "messages.parquet"
_PARQUET: Final = b"PAR1"
_ROW_GROUP_ROWS: Final = 65_536
_ROW_GROUP_BYTES: Final = 64 * 1024 * 1024
# An older draft was left by a killed export; a younger one may still be in use.
_OLD_DRAFT_S: Final = 6 * 3600.0
_LOOK_S: Final = 30.0


class Export(NamedTuple):
    """The result of an export: the written file or object, the number of messages, and its size in bytes."""

    file: Path | str
    messages: int
    size_bytes: int


class ExportStopped(Exception):
    """The export ended early because `is_stopping` returned True. Nothing was written."""


def export_file(settings: Settings) -> Path | str:
    """Return the place of the hourly export of messages, a path or a URI, whether there is a file or not.

    It is `agent_mcp.export_file`, or `export/messages.parquet` in the data directory if that is not set.
    """
    chosen = settings.agent_mcp.export_file
    return settings.data_path / "export" / FILE_NAME if chosen is None else place_of(chosen, PROJECT_ROOT)


def place_of(text: str, folder: Path) -> Path | str:
    """Return a URI as it is, and any other text as a path, below `folder` if it is relative."""
    return text if "://" in text else folder / text


def export_messages(
    settings: Settings, place: Path | str, is_stopping: Callable[[], bool] = lambda: False
) -> Export:
    """Write all messages of all mailboxes into a Parquet file, and return their number and its size.

    An older export at this place is replaced at once, when the new one is complete.

    Args:
        settings: The settings with the tables.
        place: The path to write, or the URI of an object.
        is_stopping: Called for each part of the messages. When it returns True, the export ends. By default the
            export never ends early.

    Raises:
        UsageError: There is something else than a Parquet file, or the place cannot be written.
        NotFound: There are no messages yet.
        ExportStopped: `is_stopping` returned True.
        TrunklineError: The tables cannot be read, or disk or object store cannot be written.
    """
    local = place if isinstance(place, Path) else settings.data_path / "export" / FILE_NAME
    _prepare_folder(local)
    _check_place(place)
    draft = local.with_name(f".{local.name}.{os.urandom(4).hex()}.draft")
    try:
        messages = retry(
            partial(_write, settings, draft, is_stopping), on=(TablesUnread,), times=3, pause_s=0.5
        )
        size_bytes = draft.stat().st_size
        if isinstance(place, Path):
            draft.replace(place)
        else:
            folder, name = _in_store(place)
            folder.put(name, draft)
    except (OSError, BaseError) as error:
        raise TrunklineError(f"the messages could not be written to {place}: {reason_of(error)}") from error
    finally:
        draft.unlink(missing_ok=True)
    return Export(place, messages, size_bytes)


def _in_store(place: str) -> tuple[ObjectStore, str]:
    folder, _, name = place.rpartition("/")
    return from_url(folder), name


def _prepare_folder(file: Path) -> None:
    """Make the folder and remove old drafts. Raises UsageError if that is impossible."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for draft in file.parent.glob(f".{file.name}.*.draft"):
            with suppress(OSError):
                if time.time() - draft.stat().st_mtime > _OLD_DRAFT_S:
                    draft.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None


def _check_place(place: Path | str) -> None:
    """Raise UsageError if what is there must not be overwritten, or cannot be read."""
    try:
        if isinstance(place, Path):
            with place.open("rb") as there:
                begin = there.read(len(_PARQUET))
        else:
            store, name = _in_store(place)
            begin = bytes(store.get_range(name, start=0, length=len(_PARQUET)))
    except FileNotFoundError:
        if isinstance(place, str) or not place.is_symlink():
            return
        begin = b""
    except (OSError, BaseError) as error:
        raise UsageError(f"cannot write {place}: {reason_of(error)}") from None
    if begin != _PARQUET:
        raise UsageError(f"{place} is there and no Parquet file; it is not overwritten")


def _write(settings: Settings, draft: Path, is_stopping: Callable[[], bool]) -> int:
    """Write all messages into the file `draft`, and return their number."""
    messages = 0
    with draft.open("wb") as sink:
        with pq.ParquetWriter(sink, EXPORT_SCHEMA, compression="zstd") as writer:
            # Each row group costs the readers of the file time, so small parts are joined.
            for group in joined(_exported_messages(settings), _ROW_GROUP_ROWS, _ROW_GROUP_BYTES):
                if is_stopping():
                    raise ExportStopped
                writer.write_table(group)
                messages += group.num_rows
        sink.flush()
        os.fsync(sink.fileno())
    return messages


class MessageExporter(ThreadedService):
    """The gateway's background service that writes the hourly export of all messages.

    It looks every 30 seconds whether the export is due. `close` stops a running export, and the older file
    stays. Errors are logged, and it tries again.

    Args:
        settings: The settings with the tables, the file and its interval.
        clock: Returns seconds since 1970 UTC.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        super().__init__("message-export")
        self._settings = settings
        self._interval_s = settings.agent_mcp.export_interval_ms / 1000
        self._place = export_file(settings)
        self._clock = clock

    def is_due(self) -> bool:
        """Return whether the export must be written now.

        True if its file is missing, is older than `agent_mcp.export_interval_ms`, or has a time in the future,
        an object by more than that interval.
        """
        try:
            if isinstance(self._place, Path):
                written_s = self._place.stat().st_mtime
            else:
                store, name = _in_store(self._place)
                written_s = store.head(name)["last_modified"].timestamp()
        except (OSError, BaseError):
            return True
        age_s = self._clock() - written_s
        # The clock of an object store may be ahead of this machine's.
        return not (0 if isinstance(self._place, Path) else -self._interval_s) <= age_s < self._interval_s

    def _run(self) -> None:
        while not self._closing.wait(min(_LOOK_S, self._interval_s)):
            if not self.is_due():
                continue
            try:
                made = export_messages(self._settings, self._place, self._closing.is_set)
            except NotFound:
                continue  # no message yet
            except ExportStopped:
                return
            except TrunklineError as error:
                log.warning("messages_not_exported", why=str(error))
            except Exception:
                log.exception("messages_not_exported")
            else:
                log.info("messages_exported", file=str(made.file), messages=made.messages)
