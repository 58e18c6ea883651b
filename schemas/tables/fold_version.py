"""The fold version that settled a ledger. It is stored in the table, and each program with a fold checks it.

A new version may decide differently, and both runners must switch to it at the same record. Programs therefore
do not start on a ledger of another version. `trunkline fold switch` switches the ledger to the new version.
"""

from __future__ import annotations

from typing import Final

import orjson
import pyarrow.compute as pc
from deltalake import DeltaTable

from schemas.fold.settled import FOLD_VERSION
from schemas.settings.settings import Settings
from schemas.streams.control.control_fold import CONTROL_FOLD_SWITCHED
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import Refused
from trunkline_agent.wire.verdicts import ACCEPTED

FOLD_PROPERTY: Final = "trunkline.foldVersion"
# The body of the last switch record. A switch that was interrupted can still append it to the log.
SWITCH_PROPERTY: Final = "trunkline.foldSwitch"


def version_of(ledger: DeltaTable) -> int | None:
    """Return the fold version that settled the newest rows of `ledger`, or None for a ledger without rows.

    The version is read from the table property `trunkline.foldVersion`. If that is missing, it is the highest
    version in the column `fold_version`.
    """
    noted = ledger.metadata().configuration.get(FOLD_PROPERTY)
    if noted is not None:
        return int(noted)
    newest = pc.max(dataset_of(ledger).to_table(columns=["fold_version"])["fold_version"]).as_py()
    return None if newest is None else int(newest)


def _ledger(settings: Settings) -> DeltaTable | None:
    path = settings.table_path(LEDGER)
    return DeltaTable(path) if DeltaTable.is_deltatable(path) else None


def noted_switch(settings: Settings) -> str | None:
    """Return the body of the last switch to a new fold version, as the ledger's table properties store it.

    Returns:
        The body of the record `control.fold_switched` as JSON, or None if there is no ledger or no switch. If
        the switch was interrupted, this record may be missing in the log, and the caller appends it.
    """
    ledger = _ledger(settings)
    return None if ledger is None else ledger.metadata().configuration.get(SWITCH_PROPERTY)


def check_fold_version(settings: Settings) -> None:
    """Check at a program's start that the ledger was settled by the fold version of this program.

    Returns at once if there is no ledger, or a ledger without rows.

    Raises:
        Refused: another version settled the ledger. The message says what to do.
    """
    ledger = _ledger(settings)
    found = None if ledger is None else version_of(ledger)
    if found is not None and found != FOLD_VERSION:
        raise Refused(other_version(found))


def check_switch(record_type: str | None, verdict: str, value: bytes | None) -> None:
    """Check that a settled record does not switch the log to a fold version newer than that of this program.

    A program calls it for each record that it settled, because it must not settle the records after a switch.

    Args:
        record_type: the type of the record. `None` if its headers are invalid.
        verdict: the verdict on the record.
        value: the body of the record. `None` if the record has none.

    Raises:
        Refused: the record is an accepted switch to a newer version. The message says what to do.
    """
    if record_type == CONTROL_FOLD_SWITCHED and verdict == ACCEPTED and value is not None:
        to_version = int(orjson.loads(value)["to_version"])
        if to_version > FOLD_VERSION:
            raise Refused(other_version(to_version))


def other_version(found: int) -> str:
    """Return the error message for a ledger that was settled by another fold version than this program's.

    The message says what to do. `found` is the ledger's version.
    """
    what = f"the ledger is settled by version {found} of the fold, and this program has version {FOLD_VERSION}"
    if found > FOLD_VERSION:
        return f"{what}: it is older than the ledger; start the newer program"
    return (
        f"{what}: back up, stop the stack (./trunkline down) and all other doors, and run ./trunkline upgrade"
    )
