"""Reads all messages from the Delta tables `mailbox` and `message_bodies`, as rows of an export (AM-07).

Each table is read at one version, `mailbox` first. A body is written before its row in `mailbox`, so every
message has one. Memory is bounded by `_MESSAGES_AT_ONCE` rows without bodies and a few batches of bodies. For
each such group of rows, all bodies are read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from math import inf
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import CLAIMED, MAILBOX_VIEW, MESSAGE_BODIES, READ
from schemas.tables.delta_files import small_batches
from trunkline_agent.errors import NotFound, TrunklineError
from trunkline_agent.wire.field_checks import is_utc_timestamp

_KEY: Final = ["realm", "recipient", "message_id"]
_HEAD: Final = [*_KEY, "sender", "priority", "status", "posted_at", "sent_at"]
_MESSAGES_AT_ONCE: Final = 250_000
# A body has up to a mebibyte, so few are decoded at once. Small batches are joined again.
_ROWS_DECODED: Final = 32
_HEADS_DECODED: Final = 16_384
_ROWS_JOINED: Final = 65_536
_BYTES_JOINED: Final = 32 * 1024 * 1024
_MOMENT: Final = pa.timestamp("us", tz="UTC")

# Required columns are also required in the file, so that readers can rely on them.
EXPORT_SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("from_agent", pa.string(), nullable=False),
        pa.field("to_agent", pa.string(), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("read", pa.bool_(), nullable=False),
        pa.field("priority", pa.string(), nullable=False),
        pa.field("created_at", _MOMENT),
    ]
)


class TablesUnread(TrunklineError):
    """The tables could not be read, because maintenance or a rebuild removed files. A retry can succeed."""


def exported_messages(settings: Settings) -> Iterator[pa.Table]:
    """Yield all messages of all mailboxes as Arrow tables, in no particular order.

    The columns are those of EXPORT_SCHEMA: id, sender, recipient, content, times, and whether the message was
    read. Messages that Spark has not settled yet are absent, because only the Delta tables are read.

    Raises:
        NotFound: There are no tables yet.
        TablesUnread: The tables cannot be read now.
        TrunklineError: A message has no body.
    """
    try:
        yield from _read(settings)
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise TablesUnread(f"the messages below {settings.tables_root} cannot be read: {error}") from error


def _read(settings: Settings) -> Iterator[pa.Table]:
    paths = [settings.table_path(name) for name in (MAILBOX_VIEW, MESSAGE_BODIES)]
    if not all(DeltaTable.is_deltatable(path) for path in paths):
        raise NotFound(
            f"there are no messages in the tables below {settings.tables_root} yet: they appear with the first "
            "message that 'streams' has settled"
        )
    mailbox, bodies = (DeltaTable(path) for path in paths)
    for heads in joined(_tables(mailbox, _HEAD, _HEADS_DECODED), _MESSAGES_AT_ONCE):
        keys, found = _keys(heads), 0
        found_bodies = _tables(bodies, [*_KEY, "body"], _ROWS_DECODED)
        for part in joined(found_bodies, _ROWS_JOINED, _BYTES_JOINED):
            # The index in `heads` of the message of each body, null if it is not among them.
            places = pc.index_in(_keys(part), value_set=keys)
            wanted = places.is_valid()
            places = places.filter(wanted)
            if len(places):
                found += len(places)
                yield _rows(heads.take(places), part["body"].filter(wanted))
        if found != heads.num_rows:
            raise TrunklineError(
                f"{heads.num_rows - found} messages have no body below {settings.tables_root}; "
                "rebuild_views makes the tables anew from the ledger"
            )


def joined(parts: Iterable[pa.Table], rows_most: int, bytes_most: float = inf) -> Iterator[pa.Table]:
    """Join successive small tables into larger ones, and yield each.

    A table is yielded when it has at least `rows_most` rows or `bytes_most` bytes. The last one may be smaller.
    """
    held: list[pa.Table] = []
    rows = size = 0
    for part in parts:
        held.append(part)
        rows, size = rows + part.num_rows, size + part.nbytes
        if rows >= rows_most or size >= bytes_most:
            yield pa.concat_tables(held)
            held, rows, size = [], 0, 0
    if rows:
        yield pa.concat_tables(held)


def _tables(table: DeltaTable, columns: list[str], decoded: int) -> Iterator[pa.Table]:
    return (pa.Table.from_batches([batch]) for batch in small_batches(table, columns, decoded))


def _keys(table: pa.Table) -> pa.Array:
    """Return one text for each row; no part of a key contains a slash."""
    keys = pc.binary_join_element_wise(*(table[name].cast(pa.string()) for name in _KEY), "/")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _rows(heads: pa.Table, bodies: pa.ChunkedArray) -> pa.Table:
    posted_us = heads["posted_at"].cast(_MOMENT).cast(pa.int64())
    columns = [
        heads["message_id"],
        heads["sender"],
        heads["recipient"],
        bodies,
        pc.divide(posted_us, 1000),
        pc.is_in(heads["status"], value_set=pa.array([READ, CLAIMED], heads["status"].type)),
        heads["priority"],
        pa.array(map(_moment, heads["sent_at"].to_pylist()), _MOMENT),
    ]
    typed = [
        column.cast(field.type) if column.type != field.type else column
        for column, field in zip(columns, EXPORT_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(typed, schema=EXPORT_SCHEMA)


def _moment(said: str | None) -> datetime | None:
    """Return the sending time that the sender claims, or None if it is no time in UTC."""
    # More than six digits of a fraction are cut off.
    return None if said is None or not is_utc_timestamp(said) else datetime.fromisoformat(said)
