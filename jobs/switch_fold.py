"""Switches a ledger on to this program's version of the fold: `./trunkline fold switch` calls it.

Reads: the ledger's end and the views' progress.
Owns: the note in the ledger's properties that says which version settles it.
Guarantees: the note changes only when ledger and views hold the log up to the offsets that are given, under the
lock of the views, so that no streams run meanwhile. No row is touched: what the earlier version has settled
stands, and entries are read by the new one as they are.
On restart: nothing to go on from; the note is there or it is not.

Exit codes: 0; 3 there is no ledger; 4 refused: not caught up, streams run, or the ledger is ahead.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from jobs.rebuild_views import open_ledger
from jobs.views.view_changes import next_offsets
from jobs.views.view_lock import views_lock
from schemas.errors import Refused, TrunklineError
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.umask import keep_files_private
from schemas.settings.settings import Settings, SettingsError, load_settings
from schemas.streams.control.control_fold import FoldSwitched, records_left
from schemas.streams.views import STREAM_ENTRIES
from schemas.tables.delta_files import dataset_of
from schemas.tables.fold_version import FOLD_PROPERTY, SWITCH_PROPERTY, other_version, version_of
from schemas.tables.view_progress import read_progress


def state_of(settings: Settings) -> dict[str, Any]:
    """Which version settles the ledger, which one this program has, how far ledger and views are, and the last
    switch. Raises NotFound.
    """
    ledger = open_ledger(settings)
    ends: dict[int, int] = {}
    for batch in dataset_of(ledger).to_batches(columns=["partition", "offset"]):
        for partition, end in next_offsets(pa.Table.from_batches([batch])).items():
            ends[partition] = max(end, ends.get(partition, 0))
    path = settings.table_path(STREAM_ENTRIES)
    views = read_progress(DeltaTable(path)).offsets if DeltaTable.is_deltatable(path) else {}
    return {
        "ledger_version": version_of(ledger),
        "program_version": FOLD_VERSION,
        "ledger": {str(partition): end for partition, end in sorted(ends.items())},
        "views": {str(partition): end for partition, end in sorted(views.items())},
        "switch": json.loads(ledger.metadata().configuration.get(SWITCH_PROPERTY, "null")),
    }


def switch(settings: Settings, ends: dict[str, int]) -> dict[str, Any]:
    """Switch, when ledger and views hold the log up to `ends`; returns the state after. Raises NotFound,
    Refused.
    """
    with views_lock(settings):
        state = state_of(settings)
        before = state["ledger_version"]
        if before is not None and before > FOLD_VERSION:
            raise Refused(other_version(before))
        for part, left in records_left(state, ends).items():
            if left:
                raise Refused(
                    f"the {part} lack records of the log, {sum(left.values())} in all (by partition: {left}): "
                    "start the version before (./trunkline up --only kafka,streams), wait until "
                    "./trunkline fold status says that none are left, stop it, and try again"
                )
        body = FoldSwitched(from_version=before or 0, to_version=FOLD_VERSION, offsets=ends)
        noted = {FOLD_PROPERTY: str(FOLD_VERSION), SWITCH_PROPERTY: body.model_dump_json()}
        open_ledger(settings).alter.set_table_properties(noted, raise_if_not_exists=False)
        return state_of(settings)


def main(arguments: list[str] | None = None) -> int:
    """Show the state or switch; prints one JSON object."""
    parser = argparse.ArgumentParser(prog="switch_fold", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--at", type=json.loads, metavar="JSON", help="switch, if all is settled up to these offsets"
    )
    args = parser.parse_args(arguments)
    try:
        settings = load_settings()
        found = state_of(settings) if args.at is None else switch(settings, args.at)
    except SettingsError as error:
        print(f"switch_fold: {error}", file=sys.stderr)
        return 2
    except TrunklineError as error:
        print(f"switch_fold: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
