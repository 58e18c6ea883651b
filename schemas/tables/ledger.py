"""The ledger, one row per settled Kafka record: its columns, and the conversion of records to rows and back."""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from schemas.fold.entries import Writes
from schemas.fold.settled import FOLD_VERSION, AppliedChange, Settled
from schemas.keys.sealing import Keyring, value_purpose
from schemas.wire.ids import parse_stream_key
from schemas.wire.record import STANDARD_HEADERS, Record

LEDGER: Final = "ledger"
_encode_changes: Final = msgspec.json.Encoder().encode


class LedgerRow(NamedTuple):
    """One row of `ledger`, in the order of its columns.

    `logged_at` is in microseconds since 1970 UTC. `sent_at` is the text that the sender claims: it decides
    nothing, and is null in the table if it is not a time.

    `value` has the original bytes, masked if `masked` names something. In that case `value_sealed` has the
    original bytes, sealed for `value/<topic>/<partition>/<offset>`.

    `changes`, `entries` and `accepted_offset` are set in a stream's last row of a micro-batch and describe the
    effect of the batch on the stream. `changes` is a JSON list of `{view, key, offset, row}`, the last for each
    view and key. `entries` are the stream state's written entries, with None for a deleted one.
    `accepted_offset` is the offset of the last accepted record.

    `wire` has key and headers as JSON (base64) if they cannot be derived from the other columns, else None.
    """

    topic: str
    partition: int
    offset: int
    stream_kind: str
    stream_id: str
    door: str | None
    principal: str | None
    ce_id: str | None
    type: str | None
    seq: int | None
    sent_at: str | None
    logged_at: int
    verdict: str
    reason: str | None
    why: str | None
    late: bool
    masked: str | None
    status_after: str | None
    fold_version: int
    value: bytes | None
    value_sealed: str | None
    changes: str | None
    entries: list[tuple[str, bytes | None]] | None
    accepted_offset: int | None
    wire: str | None


COLUMNS: Final = LedgerRow._fields


def ledger_row(
    record: Record,
    settled: Settled,
    keyring: Keyring,
    changes: Collection[AppliedChange] = (),
    writes: Writes | None = None,
    accepted_offset: int | None = None,
) -> LedgerRow:
    """Return the row of one settled record.

    `changes`, `writes` and `accepted_offset` are given for a stream's last row of a micro-batch only: the
    changed rows of views, the written entries of the stream state, and the offset of the last accepted record.
    """
    envelope = settled.envelope
    sealed = None
    if settled.masked is not None and record.value is not None:
        purpose = value_purpose(record.topic, record.partition, record.offset)
        sealed = keyring.seal(record.value, purpose)
    return LedgerRow(
        record.topic,
        record.partition,
        record.offset,
        settled.stream_kind,
        settled.stream_id,
        None if envelope is None else envelope.door,
        None if envelope is None else envelope.principal,
        None if envelope is None else envelope.ce_id,
        None if envelope is None else envelope.type,
        settled.seq,
        settled.sent_at,
        record.logged_at_us,
        settled.verdict,
        settled.reason,
        settled.why,
        settled.late,
        settled.masked,
        settled.status_after,
        FOLD_VERSION,
        record.value if settled.shown is None else settled.shown,
        sealed,
        _encode_changes(list(changes)).decode("utf-8") if changes else None,
        sorted(writes.items()) if writes else None,
        accepted_offset,
        None if _is_given_back_by_columns(record, settled) else _wire(record),
    )


def _is_given_back_by_columns(record: Record, settled: Settled) -> bool:
    standard = settled.envelope is not None and record.header_names == STANDARD_HEADERS
    return standard and parse_stream_key(record.key) is not None


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else base64.b64encode(raw).decode("ascii")


def _wire(record: Record) -> str:
    document: dict[str, Any] = {
        "key": _text(record.key),
        "headers": [
            [name, _text(raw)] for name, raw in zip(record.header_names, record.header_values, strict=True)
        ],
    }
    return orjson.dumps(document).decode("utf-8")


def record_of_row(row: LedgerRow, keyring: Keyring) -> Record:
    """Return the Kafka record of which `row` was made, for a refold. Raises UnsealError, ValueError.

    It equals the original in everything that the fold reads. `ce_time` and `content-type`, which the fold does
    not read, are empty.
    """
    value = row.value
    if row.value_sealed is not None:
        value = keyring.open(row.value_sealed, value_purpose(row.topic, row.partition, row.offset))
    if row.wire is not None:
        wire = _parsed_wire(row.wire)
        key, headers = _raw(wire.key), [(name, _raw(text)) for name, text in wire.headers]
    else:
        key = f"{row.stream_kind}/{row.stream_id}".encode("ascii")
        source = f"{row.door}/{row.principal}"
        texts = ("1.0", row.ce_id, source, row.type, "", None, "")
        pairs = zip(STANDARD_HEADERS, texts, strict=True)
        headers = [(name, key if text is None else text.encode("utf-8")) for name, text in pairs]
    names, values = tuple(name for name, _ in headers), tuple(raw for _, raw in headers)
    return Record(row.topic, row.partition, row.offset, row.logged_at, key, value, names, values)


class _Wire(msgspec.Struct, frozen=True):
    key: str | None
    headers: list[tuple[str, str | None]]


_decode_wire: Final = msgspec.json.Decoder(_Wire).decode


def _parsed_wire(text: str) -> _Wire:
    try:
        return _decode_wire(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"wire: not key and headers: {error}") from None


def _raw(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
