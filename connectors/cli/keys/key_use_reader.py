"""The use of the master keys: which have ended, and which programs may still append under an older one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow.compute as pc

from connectors.programs.local_stack.control import running_state
from connectors.programs.local_stack.part_plan import BRIDGE, FILES, GATEWAY
from schemas.fold.entries import Entries
from schemas.settings.settings import Settings
from schemas.streams.control.record_macs import MACS, rules_of
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.delta_files import rows_at
from schemas.tables.ledger import LEDGER
from trunkline_agent.wire.ids import CONTROL
from trunkline_agent.wire.verdicts import REJECTED

# Records that were logged earlier say nothing of the programs that run now.
_LOOK_BACK: Final = timedelta(hours=1)
# The parts of the local stack that append records with a MAC.
_SIGNING_PARTS: Final = (GATEWAY, BRIDGE, FILES)


def ended_keys(settings: Settings) -> set[str]:
    """Return the ids of the master keys that have ended, as far as the view tables have the log.

    A key counts as ended as soon as one partition of the log has its end. Without view tables, none has ended.

    Raises:
        TrunklineError: The table `stream_entries` cannot be read.
    """
    are_rules = (pc.field("stream_kind") == CONTROL) & pc.starts_with(pc.field("stream_id"), MACS)
    found = _rows(settings, STREAM_ENTRIES, are_rules, ["entry", "value"])
    states = [rules_of(Entries({row["entry"]: row["value"]})) for row in found]
    return {key_id for rules in states if rules is not None for key_id in rules.ended}


def signers_still_under(settings: Settings, key_id: str, active: str) -> dict[str, datetime]:
    """Return the signers that may still append records under an older master key.

    For each of them, the result has the time of its newest record under that key. The ledger's rows of the last
    hour are read. A signer has changed to the active key if its records under that key all came later.

    Args:
        settings: The settings with the place of the ledger.
        key_id: The id of the older key.
        active: The id of the active key.

    Raises:
        TrunklineError: The ledger cannot be read.
    """
    # A rejected record may be of somebody who has no key at all.
    wanted = (pc.field("logged_at") >= datetime.now(UTC) - _LOOK_BACK) & (pc.field("verdict") != REJECTED)
    keys = pc.starts_with(pc.field("mac_key"), f"{key_id}:") | pc.starts_with(pc.field("mac_key"), f"{active}:")
    old: dict[str, datetime] = {}
    changed: dict[str, datetime] = {}
    for row in _rows(settings, LEDGER, wanted & keys, ["mac_key", "logged_at"]):
        signer, at = row["mac_key"].rpartition("/")[2], row["logged_at"]
        if row["mac_key"].startswith(f"{key_id}:"):
            old[signer] = max(at, old.get(signer, at))
        else:
            changed[signer] = min(at, changed.get(signer, at))
    return {signer: last for signer, last in old.items() if signer not in changed or changed[signer] < last}


def _rows(settings: Settings, table: str, where: pc.Expression, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table that match `where`; none if there is no table."""
    found = rows_at(settings.table_path(table), columns, where)
    for batch in () if found is None else found.to_batches():
        yield from batch.to_pylist()


def parts_with_older_keys(settings: Settings) -> list[str]:
    """Return the parts of the running local stack that started before the file of the master keys changed.

    They may go on with the key that was active then. The list is empty if the keys come from the environment.
    """
    state = running_state(settings)
    if state is None or settings.master_key is not None:
        return []
    changed_at = settings.key_file.stat().st_mtime
    found = {name: part for name, part in state["parts"].items() if name in _SIGNING_PARTS and part["created"]}
    return [name for name, part in found.items() if part["created"] < changed_at]
