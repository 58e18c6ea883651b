"""By which version of the fold a ledger is settled: noted in the table, and checked by whoever runs the fold.

A new version may decide differently, and both runners must begin with it at the same record. So programs do
not start on a ledger of another version; `trunkline fold switch` switches it on.
"""

from __future__ import annotations

from typing import Final

import orjson
import pyarrow.compute as pc
from deltalake import DeltaTable

from schemas.errors import Refused
from schemas.fold.settled import FOLD_VERSION
from schemas.settings.settings import Settings
from schemas.streams.control.control_fold import CONTROL_FOLD_SWITCHED
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.wire.verdicts import ACCEPTED

FOLD_PROPERTY: Final = "trunkline.foldVersion"
# The body of the last switch's record, so that a switch that broke off can still say it in the log.
SWITCH_PROPERTY: Final = "trunkline.foldSwitch"


def version_of(ledger: DeltaTable) -> int | None:
    """The version that `ledger` is settled by; by its rows where it has no note yet, None without rows."""
    noted = ledger.metadata().configuration.get(FOLD_PROPERTY)
    if noted is not None:
        return int(noted)
    newest = pc.max(dataset_of(ledger).to_table(columns=["fold_version"])["fold_version"]).as_py()
    return None if newest is None else int(newest)


def noted_switch(settings: Settings) -> str | None:
    """The body of the last switch's record as the ledger notes it, JSON; None where nothing was switched."""
    path = settings.table_path(LEDGER)
    if not DeltaTable.is_deltatable(path):
        return None
    return DeltaTable(path).metadata().configuration.get(SWITCH_PROPERTY)


def check_fold_version(settings: Settings) -> None:
    """Raises Refused when there is a ledger that is settled by another version than this program's."""
    path = settings.table_path(LEDGER)
    if not DeltaTable.is_deltatable(path):
        return
    found = version_of(DeltaTable(path))
    if found is not None and found != FOLD_VERSION:
        raise Refused(other_version(found))


def check_switch(record_type: str | None, verdict: str, value: bytes | None) -> None:
    """Raises Refused for the settled record that switches on a newer version than this program's: what comes
    after it is not to be settled by this one.
    """
    if record_type == CONTROL_FOLD_SWITCHED and verdict == ACCEPTED and value is not None:
        to_version = int(orjson.loads(value)["to_version"])
        if to_version > FOLD_VERSION:
            raise Refused(other_version(to_version))


def other_version(found: int) -> str:
    """What to do about a ledger that is settled by the version `found`."""
    what = f"the ledger is settled by version {found} of the fold, and this program has version {FOLD_VERSION}"
    if found > FOLD_VERSION:
        return f"{what}: it is older than the ledger; start the newer program"
    return (
        f"{what}: let the version before settle what is in the log, close the doors (./trunkline down; "
        "./trunkline up --only kafka), then run ./trunkline fold switch"
    )
