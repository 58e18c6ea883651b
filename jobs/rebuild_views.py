"""Builds all view tables anew from `ledger`, or checks them: by a refold of the raw bytes (`--check`).

Reads: the table `ledger`; with `--check` also the view tables and the master keys.
Owns: nothing of its own. It writes `<table>.new` beside each view table, then swaps the two. Refuses while
another process writes the views (view_lock.py); `--check` only reads and may run at any time.
Guarantees: after a swap each view table is what the ledger's changes and entries say, and build_views goes on
from there.
On restart: a rebuild that was killed is begun anew; killed while it swapped, the tables that are in place are
already the new ones, and build_views does not start before the rest is there.

Exit codes: 0 built, or equal; 3 there is no ledger; 4 the check found a difference, or a writer is running.
The swap renames directories. Where tables are not on a local disk, missing ones are built in their place, and
complete ones must be deleted first.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from jobs.refold import check_views
from jobs.views.view_changes import CHANGE_COLUMNS, Key, RowChange, changes_of
from jobs.views.view_lock import views_lock
from jobs.views.view_tables import ViewTable, are_complete, open_tables
from schemas.errors import NotFound, Refused, TrunklineError
from schemas.keys.sealing import load_keyring
from schemas.keys.umask import keep_files_private
from schemas.settings.settings import Settings, SettingsError, load_settings
from schemas.streams.views import STREAM_ENTRIES, VIEW_TABLES
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import ViewProgress

# Ledger rows that are reduced to changes at once.
_CHUNK_ROWS = 200_000


def open_ledger(settings: Settings) -> DeltaTable:
    """The ledger. Raises NotFound."""
    path = settings.table_path(LEDGER)
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        raise NotFound(f"there is no ledger at {path}") from None


def rebuild(settings: Settings) -> ViewProgress:
    """Build the view tables from the ledger and put them in place of those there are. The caller holds the
    lock. Raises NotFound, Refused."""
    ledger = open_ledger(settings)
    root = settings.tables_root
    if "://" in root:
        if are_complete(settings):
            raise Refused(f"the views at {root} cannot be swapped there: delete the view tables and start anew")
        # What an earlier attempt has left is of the same ledger, and filling in the same again changes nothing.
        return fill(open_tables(settings), ledger)
    tables = {}
    for name in VIEW_TABLES:
        fresh = f"{settings.table_path(name)}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        tables[name] = ViewTable(fresh, name, settings.views.keep_old_files_h)
    progress = fill(tables, ledger)
    for name in VIEW_TABLES:
        swap(Path(settings.table_path(name)))
    return progress


def fill(tables: dict[str, ViewTable], ledger: DeltaTable) -> ViewProgress:
    """Apply the whole ledger, at the version at which it is loaded, to empty view tables."""
    offsets: dict[int, int] = {}
    removed: dict[tuple[str, Key], int] = {}
    for rows in chunks(ledger):
        changes = changes_of(rows)
        for partition, offset in changes.next_offsets.items():
            offsets[partition] = max(offset, offsets.get(partition, 0))
        for name, table in tables.items():
            table.apply(
                {
                    key: change
                    for key, change in changes.tables[name].items()
                    if not is_outdated(removed, name, key, change)
                }
            )
    progress = ViewProgress(offsets, ledger.version())
    tables[STREAM_ENTRIES].note(progress)
    return progress


def is_outdated(removed: dict[tuple[str, Key], int], name: str, key: Key, change: RowChange) -> bool:
    """Whether the row was removed by a later record: files come in no order. Remembers removals."""
    last = removed.get((name, key), -1)
    if change.row is None and change.offset > last:
        removed[name, key] = change.offset
    return change.offset < last


def chunks(ledger: DeltaTable) -> Iterator[pa.Table]:
    """The columns that matter of all ledger rows, some rows at a time."""
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


def swap(path: Path) -> None:
    """Put `<path>.new` in the place of `path`. Readers that have the old files open keep them."""
    old = path.with_name(f"{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    path.with_name(f"{path.name}.new").rename(path)
    shutil.rmtree(old, ignore_errors=True)


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
    """Rebuild or check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="rebuild_views", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="refold the ledger's bytes and compare, change nothing"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON object")
    args = parser.parse_args(arguments)
    try:
        settings = load_settings()
        if args.check:
            return _print_check(settings, as_json=args.json)
        with views_lock(settings):
            progress = rebuild(settings)
    except SettingsError as error:
        print(f"rebuild_views: {error}", file=sys.stderr)
        return 2
    except TrunklineError as error:
        print(f"rebuild_views: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(msgspec.json.encode(progress).decode())
    else:
        print(f"the views hold the ledger up to its version {progress.ledger_version}")
    return 0


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
