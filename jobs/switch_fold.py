"""The switch of a ledger to this program's version of the fold; `./trunkline fold switch` runs it.

Reads: the ledger's end and the views' progress.
Owns: the property of the ledger with the version of the fold that settles it.
Guarantees: the property changes only if ledger and views have the log up to the given offsets, under the lock
of the views, so that no streams run meanwhile. The switch brings the views to the ledger's end. It builds them
anew if they have other columns. No row of the ledger is changed: verdicts of the earlier version stay valid,
and the new version reads its entries as they are.
On restart: starts again without any state.

Exit codes: 0; 3 there is no ledger; 4 refused: not caught up, streams run, or the ledger is ahead.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from deltalake import DeltaTable

from jobs.build_views import catch_up, check_not_ahead
from jobs.driver.programs import WriterClaim, exit_code_of, open_ledger
from jobs.rebuild_views import rebuild
from jobs.views.view_changes import ends_of
from jobs.views.view_tables import WrongViewTable
from schemas.fold.settled import FOLD_VERSION
from schemas.settings.settings import Settings, load_settings
from schemas.streams.control.control_fold import FoldSwitched, records_left
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.fold_version import FOLD_PROPERTY, SWITCH_PROPERTY, other_version, version_of
from schemas.tables.view_progress import read_progress
from trunkline_agent.errors import Refused
from trunkline_agent.private_files import keep_files_private


def state_of(settings: Settings) -> dict[str, Any]:
    """Return the fold versions of ledger and program, and how far ledger and views have processed the log.

    Returns:
        A JSON document. `ledger_version` and `program_version` are fold versions. `ledger` and `views` have the
        first missing offset of each partition. `switch` is the last switch of the fold, or None.

    Raises:
        NotFound: There is no ledger.
    """
    ledger = open_ledger(settings)
    path = settings.table_path(STREAM_ENTRIES)
    views = read_progress(DeltaTable(path)).offsets if DeltaTable.is_deltatable(path) else {}
    return {
        "ledger_version": version_of(ledger),
        "program_version": FOLD_VERSION,
        "ledger": {str(partition): end for partition, end in ends_of(ledger).items()},
        "views": {str(partition): end for partition, end in sorted(views.items())},
        "switch": json.loads(ledger.metadata().configuration.get(SWITCH_PROPERTY, "null")),
    }


def switch(settings: Settings, ends: dict[str, int]) -> dict[str, Any]:
    """Switch the ledger to this program's fold version, and return the new state (see `state_of`).

    Views that lack records of the ledger are first brought to its end. If they have other columns, they are
    built anew.

    Args:
        settings: The settings of the tables.
        ends: The end offset of each Kafka partition, by the partition's number as text. The ledger must contain
            all records before these offsets.

    Raises:
        NotFound: There is no ledger.
        Refused: The ledger lacks records or has a newer version, another process writes the views, or the views
            cannot be brought to the ledger's end.
    """
    open_ledger(settings)
    check_not_ahead(settings)
    with WriterClaim(settings) as claim:
        state = state_of(settings)
        before = state["ledger_version"]
        if before is not None and before > FOLD_VERSION:
            raise Refused(other_version(before))
        lacking = records_left(state, ends)
        if left := lacking["ledger"]:
            raise Refused(
                f"the ledger lacks records of the log, {sum(left.values())} in all (by partition: {left}): "
                "start the version before (./trunkline up --only kafka,streams), wait until "
                "./trunkline fold status says that none are left, stop it, and try again"
            )
        if lacking["views"]:
            # The ledger has their changes already, so no version of the fold is needed for them.
            try:
                catch_up(settings, claim.check)
            except WrongViewTable:
                rebuild(settings, claim.check)
        body = FoldSwitched(from_version=before or 0, to_version=FOLD_VERSION, offsets=ends)
        noted = {FOLD_PROPERTY: str(FOLD_VERSION), SWITCH_PROPERTY: body.model_dump_json()}
        ledger = open_ledger(settings)
        claim.check()
        ledger.alter.set_table_properties(noted, raise_if_not_exists=False)
        return state_of(settings)


def main(arguments: list[str] | None = None) -> int:
    """Print the fold versions of ledger and program as one JSON object; with `--at`, first switch the ledger.

    Args:
        arguments: The options. None: those of the command line.

    Returns:
        The exit code: 0 done, 3 no ledger, 4 the switch was refused and nothing was changed.
    """
    parser = argparse.ArgumentParser(prog="switch_fold", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--at", type=json.loads, metavar="JSON", help="switch, if all is settled up to these offsets"
    )
    args = parser.parse_args(arguments)

    def run() -> int:
        settings = load_settings()
        print(json.dumps(state_of(settings) if args.at is None else switch(settings, args.at)))
        return 0

    return exit_code_of("switch_fold", run)


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
