"""Exports all messages into one Parquet file (AM-07), by command and every hour, for DuckDB and the like.

**Reads** the Delta tables `mailbox` and `message_bodies`. **Owns** `agent_mcp.export_file`.
**Guarantees** that the file is whole: it is written under another name and then renamed. Each gateway writes
the file when it is older than `agent_mcp.export_interval_ms`. If two gateways write at once, the later file
stays.
**On restart** the age of the file decides as before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow.parquet as pq
import structlog

from connectors.log.ledger_files.message_export_reader import (
    EXPORT_SCHEMA,
    TablesUnread,
    exported_messages,
    joined,
)
from connectors.plumbing.machine.background_service import ThreadedService
from connectors.plumbing.network.rates import retry
from schemas.settings.settings import PROJECT_ROOT, Settings
from trunkline_agent.errors import NotFound, TrunklineError, UsageError

log = structlog.stdlib.get_logger(__name__)

FILE_NAME: Final = "messages.parquet"
_PARQUET: Final = b"PAR1"
_ROW_GROUP_ROWS: Final = 65_536
_ROW_GROUP_BYTES: Final = 64 * 1024 * 1024
# An older draft was left by a killed export; a younger one may still be in use.
_OLD_DRAFT_S: Final = 6 * 3600.0
_LOOK_S: Final = 30.0


class Export(NamedTuple):
    """The result of an export: the written file, the number of messages, and the file's size in bytes."""

    file: Path
    messages: int
    size_bytes: int


class ExportStopped(Exception):
    """The export ended early because `is_stopping` returned True. Nothing was written."""


def export_file(settings: Settings) -> Path:
    """Return the path of the hourly export of messages, whether the file exists or not.

    It is `agent_mcp.export_file`, or `export/messages.parquet` in the data directory if that is not set.
    """
    chosen = settings.agent_mcp.export_file
    return settings.data_path / "export" / FILE_NAME if chosen is None else PROJECT_ROOT / chosen


def export_messages(settings: Settings, file: Path, is_stopping: Callable[[], bool] = lambda: False) -> Export:
    """Write all messages of all mailboxes into the Parquet file `file`, and return their number and its size.

    An older export at this path is replaced at once, when the new one is complete.

    Args:
        settings: The settings with the tables.
        file: The path to write.
        is_stopping: Called for each part of the messages. When it returns True, the export ends. By default the
            export never ends early.

    Raises:
        UsageError: `file` exists and is not a Parquet file, or cannot be written.
        NotFound: There are no messages yet.
        ExportStopped: `is_stopping` returned True.
        TrunklineError: The tables cannot be read, or the disk cannot be written.
    """
    _prepare_place(file)
    try:
        export = partial(_write, settings, file, is_stopping)
        return retry(export, on=(TablesUnread,), times=3, pause_s=0.5)
    except OSError as error:
        raise TrunklineError(f"the messages could not be written to {file}: {error.strerror}") from error


def _prepare_place(file: Path) -> None:
    """Make the folder and remove old drafts. Raises UsageError if `file` must not be overwritten."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink() or file.exists():
            with file.open("rb") as there:
                if there.read(len(_PARQUET)) != _PARQUET:
                    raise UsageError(f"{file} is there and no Parquet file; it is not overwritten")
        for draft in file.parent.glob(f".{file.name}.*.draft"):
            with suppress(OSError):
                if time.time() - draft.stat().st_mtime > _OLD_DRAFT_S:
                    draft.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None


def _write(settings: Settings, file: Path, is_stopping: Callable[[], bool]) -> Export:
    draft = file.with_name(f".{file.name}.{os.urandom(4).hex()}.draft")
    try:
        with draft.open("wb") as sink:
            messages = 0
            with pq.ParquetWriter(sink, EXPORT_SCHEMA, compression="zstd") as writer:
                # Each row group costs the readers of the file time, so small parts are joined.
                for group in joined(exported_messages(settings), _ROW_GROUP_ROWS, _ROW_GROUP_BYTES):
                    if is_stopping():
                        raise ExportStopped
                    writer.write_table(group)
                    messages += group.num_rows
            sink.flush()
            os.fsync(sink.fileno())
        size_bytes = draft.stat().st_size
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return Export(file, messages, size_bytes)


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
        self._file = export_file(settings)
        self._clock = clock

    def is_due(self) -> bool:
        """Return whether the export must be written now.

        True if its file is missing, is older than `agent_mcp.export_interval_ms`, or has a time in the future.
        """
        try:
            age_s = self._clock() - self._file.stat().st_mtime
        except OSError:
            return True
        return not 0 <= age_s < self._interval_s

    def _run(self) -> None:
        while not self._closing.wait(min(_LOOK_S, self._interval_s)):
            if not self.is_due():
                continue
            try:
                made = export_messages(self._settings, self._file, self._closing.is_set)
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
