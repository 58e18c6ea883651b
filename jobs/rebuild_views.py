"""The rebuild of all view tables from `ledger`, and their check by a refold of the raw bytes (`--check`).

Reads: the table `ledger`; with `--check` also the view tables and the master keys.
Owns: a folder `_rebuild-…` beside the tables, with a new table for each view. Its files are moved into the view
table by one commit. It refuses to run while another process writes the views (`WriterClaim`). `--check` only
reads and may run at any time.
Guarantees: after that commit the view table has the rows of the ledger's changes and entries, and build_views
continues from there. Readers of the versions before can go on.
On restart: a killed rebuild starts again, by itself when build_views starts. It is known by its folder.

Exit codes: 0 built, or equal; 3 there is no ledger; 4 the check found a difference, or a writer is running.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSelector

from jobs.driver.programs import WriterClaim, exit_code_of, nobody_else_writes, open_ledger
from jobs.refold import check_views
from jobs.views.key_index import SHELF
from jobs.views.view_changes import CHANGE_COLUMNS, Key, RowChange, changes_of, newest
from jobs.views.view_tables import (
    REBUILD,
    ViewTable,
    create_table,
    index_path,
    open_tables,
    rebuild_folders,
    table_properties,
)
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import Settings, load_settings
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from schemas.tables.delta_files import dataset_of, move_files, reason_of, table_storage
from schemas.tables.view_progress import NO_PROGRESS, ViewProgress, read_progress
from trunkline_agent.errors import Refused, TrunklineError
from trunkline_agent.private_files import keep_files_private

# The number of ledger rows that are reduced to changes at once.
_CHUNK_ROWS = 200_000


def rebuild(settings: Settings, check: Callable[[], None] = nobody_else_writes) -> ViewProgress:
    """Build all view tables anew from the ledger, replace the rows of the old ones, return the new progress.

    The caller holds a `WriterClaim`. Each new table is built in a folder of this rebuild and then takes the
    place of the old one by one commit. This fails if another process has claimed the tables since the call. If
    there is no old table at all, the new ones are built in their place.

    Args:
        settings: The settings of the tables.
        check: Raises if this process may not write the tables any more.

    Raises:
        NotFound: There is no ledger.
        Refused: A view table is damaged or of an earlier version, so that it must be deleted first.
        TrunklineError: A view table cannot be read now.
    """
    ledger = open_ledger(settings)
    old = {name: _old_table(settings, name) for name in VIEW_TABLES}
    check()
    left = rebuild_folders(settings)
    if not left and all(table is None for table in old.values()):
        # Nothing has to be kept. Until the progress is noted in the end, the tables are not complete.
        return fill(open_tables(settings), ledger, check)
    folder = f"{REBUILD}{uuid.uuid4().hex}"
    keep_h = settings.views.keep_old_files_h
    try:
        fresh = {name: f"{settings.tables_root}/{folder}/{name}" for name in VIEW_TABLES}
        tables = {n: ViewTable(path, n, index_path(settings, n), keep_h) for n, path in fresh.items()}
        # From now on the own folder says that a rebuild was killed.
        for other in left:
            _remove(settings.tables_root, other)
        progress = fill(tables, ledger, check)
    except BaseException:
        # The old tables are as they were; after a rebuild that was killed they are not whole.
        if not left:
            _remove(settings.tables_root, folder)
        raise
    for name in VIEW_TABLES:
        check()
        replace(settings, name, old[name], folder)
    _remove(settings.tables_root, folder)
    for name in _of_earlier_versions(settings):
        _remove(settings.tables_root, name)
    return progress


def _of_earlier_versions(settings: Settings) -> list[str]:
    """Return the folders that rebuilds of earlier versions have left: they renamed whole tables."""
    found = table_storage(settings.tables_root).get_file_info(FileSelector(""))
    made = {f"{name}{suffix}" for name in VIEW_TABLES for suffix in (".new", ".old")}
    return [one.base_name for one in found if one.base_name in made]


def _old_table(settings: Settings, name: str) -> DeltaTable | None:
    """Open the view table that a rebuild replaces; None: there is none."""
    path = settings.table_path(name)
    try:
        found = DeltaTable(path)
    except TableNotFoundError:
        return None
    except OSError as error:
        raise TrunklineError(f"{path} cannot be read: {reason_of(error)}") from error
    except DeltaError as error:
        raise Refused(f"{path} cannot be read: {reason_of(error)}. Delete it, and build again") from error
    if found.metadata().partition_columns != [SHELF]:
        raise Refused(f"{path} is stored as an earlier version did it. Delete it, and build again")
    return found


def fill(
    tables: dict[str, ViewTable], ledger: DeltaTable, check: Callable[[], None] = nobody_else_writes
) -> ViewProgress:
    """Apply all rows of the ledger to empty view tables, record the progress in them, and return it.

    The tables are then closed.

    Args:
        tables: The view tables by name.
        ledger: The ledger, read at the version at which it was loaded.
        check: Raises if this process may not write the tables any more.
    """
    offsets: dict[int, int] = {}
    with closing(Removals()) as removed:
        for rows in chunks(ledger):
            check()
            changes = changes_of(rows)
            offsets = newest(offsets, changes.next_offsets)
            for name, table in tables.items():
                found = changes.tables[name].items()
                table.apply({key: one for key, one in found if not removed.is_outdated(name, key, one)})
    progress = ViewProgress(offsets, ledger.version())
    tables[STREAM_ENTRIES].note(progress)
    for table in tables.values():
        table.close()
    return progress


class Removals:
    """The last known removal of each removed row, in a temporary database. There may be very many of them.

    Ledger rows come in no order. So a removal must be remembered, or an older change would bring the row back.
    """

    def __init__(self) -> None:
        # SQLite keeps it in memory while it is small, and deletes its file when it is closed.
        self._known = sqlite3.connect("", isolation_level=None)
        self._known.execute("PRAGMA journal_mode = OFF")
        self._known.execute("CREATE TABLE removed (row BLOB PRIMARY KEY, offset INTEGER) WITHOUT ROWID")

    def is_outdated(self, table: str, key: Key, change: RowChange) -> bool:
        """Return whether a later record has already removed the row that `change` writes, and note a removal.

        Args:
            table: The name of the view table.
            key: The key of the row.
            change: The change to check.
        """
        row = msgspec.msgpack.encode((table, key))
        found = self._known.execute("SELECT offset FROM removed WHERE row = ?", (row,)).fetchone()
        last = -1 if found is None else found[0]
        if change.row is None and change.offset > last:
            self._known.execute("INSERT OR REPLACE INTO removed VALUES (?, ?)", (row, change.offset))
        return bool(change.offset < last)

    def close(self) -> None:
        """Delete the temporary database."""
        self._known.close()


def chunks(ledger: DeltaTable) -> Iterator[pa.Table]:
    """Yield all ledger rows in tables of about 200,000 rows, in no order.

    The rows have the columns that `changes_of` needs (CHANGE_COLUMNS).
    """
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in dataset_of(ledger).to_batches(columns=list(CHANGE_COLUMNS)):
        held.append(batch)
        count += batch.num_rows
        if count >= _CHUNK_ROWS:
            yield pa.Table.from_batches(held)
            held, count = [], 0
    if held:
        yield pa.Table.from_batches(held)


def replace(settings: Settings, name: str, old: DeltaTable | None, folder: str) -> None:
    """Replace the rows of the view table `name` by those of a new table, in one commit.

    The files of the new table are moved first. Readers of older versions of the table go on.

    Args:
        settings: The settings of the tables.
        name: The name of the view table.
        old: The view table, as it was read when the rebuild began. None: it is created.
        folder: The folder of the new tables, beside the view tables.

    Raises:
        CommitFailedError: Another process has committed to the view table since then.
    """
    fresh = DeltaTable(f"{settings.tables_root}/{folder}/{name}")
    storage = table_storage(settings.tables_root)
    keep_h = settings.views.keep_old_files_h
    table = create_table(settings.table_path(name), name, keep_h) if old is None else old
    wanted = table_properties(name, keep_h)
    if not wanted.items() <= table.metadata().configuration.items():
        table.alter.set_table_properties(wanted, raise_if_not_exists=False)
    files = pa.table(fresh.get_add_actions()).to_pylist()
    move_files(storage, {f"{folder}/{name}/{file['path']}": f"{name}/{file['path']}" for file in files})
    adds: list[AddAction | RemoveAction] = [
        AddAction(
            file["path"],
            file["size_bytes"],
            {SHELF: str(file["partition"][SHELF])},
            _now_ms(),
            True,
            _statistics(file),
        )
        for file in files
    ]
    progress = read_progress(fresh) if name == STREAM_ENTRIES else NO_PROGRESS
    commit = progress.commit_properties()
    commit.max_commit_retries = 0
    table.create_write_transaction(
        adds, mode="overwrite", schema=fresh.schema(), partition_by=[SHELF], commit_properties=commit
    )


def _statistics(file: dict[str, Any]) -> str:
    """Return the statistics of a data file, as Delta's log has them. They are of texts and whole numbers."""
    named = {"minValues": file["min"], "maxValues": file["max"], "nullCount": file["null_count"]}
    return json.dumps({"numRecords": file["num_records"], **named})


def _now_ms() -> int:
    return round(time.time() * 1000)


def _remove(root: str, folder: str) -> None:
    """Delete a folder of tables with all that is in it, if it is there."""
    with suppress(FileNotFoundError):
        table_storage(root).delete_dir(folder)


def _print_check(settings: Settings, *, as_json: bool) -> int:
    found = check_views(settings, open_ledger(settings), load_keyring(settings))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        for line in found.differences:
            print(f"  {line}")
        more = found.different - len(found.differences)
        if more > 0:
            print(f"  … and {more} more")
        counts = ", ".join(f"{count} in {table}" for table, count in found.rows.items())
        verdict = "equal" if not found.different else f"{found.different} differences"
        earlier = f" ({found.adopted} of them settled by an earlier version)" if found.adopted else ""
        print(f"{verdict}: {found.records} records refolded{earlier}; rows: {counts}")
    return Refused.exit_code if found.different else 0


def main(arguments: list[str] | None = None) -> int:
    """Rebuild the view tables, or with `--check` compare them with a refold of the ledger.

    Args:
        arguments: The options. None: those of the command line.

    Returns:
        The exit code: 0 built or equal, 3 no ledger, 4 differences or another process writes the views.
    """
    parser = argparse.ArgumentParser(prog="rebuild_views", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="refold the ledger's bytes and compare, change nothing"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON object")
    args = parser.parse_args(arguments)

    def run() -> int:
        settings = load_settings()
        if args.check:
            return _print_check(settings, as_json=args.json)
        with WriterClaim(settings) as claim:
            progress = rebuild(settings, claim.check)
        text = f"the views hold the ledger up to its version {progress.ledger_version}"
        print(msgspec.json.encode(progress).decode() if args.json else text)
        return 0

    return exit_code_of("rebuild_views", run)


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
