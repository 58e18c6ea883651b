"""The state of the backbone as its runners hold it, in one form, so that two can be compared field by field.

A state is `{"rows": {view: {key: (last_offset, row)}}, "entries": {stream: {entry: bytes}}}`. Moments are
microseconds since 1970 UTC.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import DeltaTable

from connectors.hub.live.live_view import LiveView
from connectors.log.ledger_files.ledger_reader import LedgerReader
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.control.record_macs import MACS
from schemas.streams.fold import STREAM_ENTRIES, VIEWS, settle
from schemas.tables.arrow_tables import VIEW_ARROW
from schemas.tables.ledger import COLUMNS, LedgerRow, record_of_row
from tests.connectors.hub.live.local_stores import stored
from trunkline_agent.wire.ids import CONTROL

State = dict[str, Any]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros(value: Any) -> Any:
    """Return a moment as microseconds since 1970 UTC, and any other value as it is."""
    if isinstance(value, datetime):
        span = value.astimezone(UTC) - _EPOCH
        return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds
    return value


def state_of_tables(settings: Settings) -> State:
    """The view tables as they stand now."""
    rows: dict[str, dict[str, Any]] = {}
    for view in VIEWS.values():
        rows[view.VIEW] = {}
        table = DeltaTable(settings.table_path(view.VIEW)).to_pyarrow_dataset()
        # A table may have columns beside ours that only lay it out.
        for found in table.to_table(columns=VIEW_ARROW[view.VIEW].names).to_pylist():
            row = {name: micros(value) for name, value in found.items()}
            offset = row.pop("last_offset")
            row.pop("partition")
            key = "/".join(row[column] for column in view.KEY)
            assert key not in rows[view.VIEW], f"{view.VIEW}: two rows for {key}"
            rows[view.VIEW][key] = (offset, row)
    entries: dict[str, dict[str, bytes]] = {}
    for found in DeltaTable(settings.table_path(STREAM_ENTRIES)).to_pyarrow_table().to_pylist():
        stream = entries.setdefault(f"{found['stream_kind']}/{found['stream_id']}", {})
        assert found["entry"] not in stream, f"two entries {found['entry']} of {found['stream_id']}"
        stream[found["entry"]] = found["value"]
    return {"rows": rows, "entries": entries}


def state_of_live_view(view: LiveView, streams: Iterable[str]) -> State:
    """A live view as it stands now; `streams` are those whose entries are wanted."""
    rows = {
        of.VIEW: {
            row.key: (view.row_offset(of.VIEW, row.key), msgspec.structs.asdict(row))
            for row in view.rows(of.VIEW)
        }
        for of in VIEWS.values()
    }
    entries = {stream: stored(view.entries(stream)) for stream in streams}
    return {"rows": rows, "entries": {stream: held for stream, held in entries.items() if held}}


def ledger_in_order(settings: Settings) -> pa.Table:
    """All rows of the ledger, in the order of the log."""
    _, table = LedgerReader(settings).rows()
    return table.sort_by([("partition", "ascending"), ("offset", "ascending")])


def state_of_refold(ledger: pa.Table, keyring: Keyring) -> State:
    """The state that the ledger's raw bytes fold to; each verdict must be the one that stands there."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in VIEWS}
    streams: dict[tuple[str, str], Entries] = {}
    for found in ledger.to_pylist():
        row = LedgerRow(**{name: micros(found[name]) for name in COLUMNS})
        record = record_of_row(row, keyring)
        macs = streams.setdefault((CONTROL, f"{MACS}{row.partition}"), Entries())
        entries = streams.setdefault((row.stream_kind, row.stream_id), Entries())
        settled = settle(record, entries, keyring, macs)
        told = (settled.verdict, settled.reason, settled.late, settled.status_after, settled.masked)
        assert told == (row.verdict, row.reason, row.late, row.status_after, row.masked), row
        for change in settled.changes:
            assert change.row is not None
            rows[change.view][change.key] = (record.offset, msgspec.structs.asdict(change.row))
    entries = {f"{kind}/{name}": dict(held.stored()) for (kind, name), held in streams.items()}
    return {"rows": rows, "entries": {stream: held for stream, held in entries.items() if held}}


def differences(left: State, right: State, limit: int = 10) -> list[str]:
    """Describe the differences; return an empty list when the two are equal."""
    found: list[str] = []
    pairs = [(view, left["rows"][view], right["rows"][view]) for view in VIEWS]
    for name, one, other in [*pairs, (STREAM_ENTRIES, left["entries"], right["entries"])]:
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                found.append(f"{name} {key}: {one.get(key)} | {other.get(key)}")
            if len(found) == limit:
                return found
    return found
