"""Reads from the ledger what the live view has forgotten or never saw: one verdict, or the past follow-ups."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from connectors.publisher import Position
from connectors.settled_feed import SettledRecord
from schemas.delta_files import dataset_of
from schemas.errors import TrunklineError
from schemas.ledger import LEDGER
from schemas.ledger_arrow import LEDGER_ARROW
from schemas.settings import Settings

_COLUMNS: Final = [
    "stream_kind",
    "stream_id",
    "type",
    "ce_id",
    "door",
    "principal",
    "verdict",
    "reason",
    "why",
    "late",
    "status_after",
    "seq",
    "logged_at",
    "value",
]


def verdict_in_ledger(settings: Settings, position: Position) -> SettledRecord | None:
    """The settled record at `position`, None while the ledger does not have it. Raises TrunklineError."""
    where = (pc.field("partition") == position.partition) & (pc.field("offset") == position.offset)
    found = _rows(settings, where, _COLUMNS)
    if not found.num_rows:
        return None
    moments = found.column("logged_at").cast(LEDGER_ARROW.field("logged_at").type).cast(pa.int64())
    row = found.drop_columns(["logged_at"]).slice(0, 1).to_pylist()[0]
    return SettledRecord(
        position,
        f"{row['stream_kind']}/{row['stream_id']}",
        row["type"],
        row["ce_id"],
        None if row["door"] is None else f"{row['door']}/{row['principal']}",
        row["verdict"],
        row["reason"],
        row["why"],
        row["late"],
        row["status_after"],
        row["seq"],
        moments[0].as_py(),
        row["value"],
    )


def ids_by_door(settings: Settings, door: str, since_s: float) -> set[str]:
    """The CloudEvents ids of what `door` has put into the ledger since a moment of Kafka's clock (seconds since
    1970). Raises TrunklineError.
    """
    since = pa.scalar(int(since_s * 1e6), LEDGER_ARROW.field("logged_at").type)
    found = _rows(settings, (pc.field("logged_at") >= since) & (pc.field("door") == door), ["ce_id"])
    return {ce_id for ce_id in found.column("ce_id").to_pylist() if ce_id is not None}


def _rows(settings: Settings, where: pc.Expression, columns: list[str]) -> pa.Table:
    path = settings.table_path(LEDGER)
    try:
        if not DeltaTable.is_deltatable(path):
            return LEDGER_ARROW.empty_table().select(columns)
        # The files' statistics leave out nearly all of them when a position is asked for.
        return dataset_of(DeltaTable(path)).to_table(filter=where, columns=columns)
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise TrunklineError(f"the ledger at {path} cannot be read: {error}") from error
