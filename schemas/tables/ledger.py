"""The ledger, one row per settled Kafka record: its columns, and the conversion of records to rows and back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Final, NamedTuple

import msgspec

from schemas.fold.entries import Writes
from schemas.fold.settled import FOLD_VERSION, AppliedChange, Settled
from schemas.fold.view_rows import Moment
from schemas.keys.sealing import Keyring, value_purpose
from schemas.wire.record import MAC_HEADERS, STANDARD_HEADERS, Record
from trunkline_agent.wire.ids import REFUSED, parse_stream_key

LEDGER: Final = "ledger"
Int32 = Annotated[int, "32 bits"]
TextMoment = Annotated[str, "ISO 8601; null in the table if it is not a time"]
_to_json: Final = msgspec.json.Encoder().encode
_USUAL_HEADERS: Final = (STANDARD_HEADERS, MAC_HEADERS)


class LedgerRow(NamedTuple):
    """One row of `ledger`, in the order of its columns.

    `logged_at` is in microseconds since 1970 UTC. `sent_at` is the text that the sender claims; it is null in
    the table if it is not a time. `value_sealed` has the original bytes of a masked `value`, sealed for
    `value/<topic>/<partition>/<offset>`.

    `changes`, `entries` and `accepted_offset` are set in a stream's last row of a micro-batch and describe the
    effect of the batch on the stream. `changes` is a JSON list of `{view, key, offset, row}`, the last for each
    view and key.
    """

    topic: str
    """Kafka topic of the record."""
    partition: Int32
    """Kafka partition of the record."""
    offset: int
    """Kafka offset of the record."""
    stream_kind: str
    """Kind of the record's stream, such as `job`."""
    stream_id: str
    """Name of the stream within its kind."""
    door: str | None
    """Door that appended the record; as claimed, if there is no MAC. Null if the headers cannot be read."""
    principal: str | None
    """Principal that sent the record, as the door authenticated it; as claimed, if the record has no MAC."""
    ce_id: str | None
    """CloudEvents id of the record."""
    type: str | None
    """Record type."""
    seq: int | None
    """Number of the event within its job, given by the publisher."""
    sent_at: TextMoment | None
    """Time that the sender claims. It decides nothing."""
    logged_at: Moment
    """Time at which Kafka appended the record."""
    verdict: str
    """`accepted`, `duplicate` or `rejected`."""
    reason: str | None
    """Why the record was rejected, as one word."""
    why: str | None
    """Explanation of the reason, without quotes of the input."""
    late: bool
    """True if an event with a higher `seq` was accepted before."""
    masked: str | None
    """Names of what is masked in `value`, joined by commas."""
    status_after: str | None
    """Status of the job, task or other thing of the stream after the record."""
    fold_version: Int32
    """Version of the fold that settled the record."""
    value: bytes | None
    """Body of the record, masked where `masked` says so."""
    value_sealed: str | None
    """The original body, sealed, if `value` is masked."""
    changes: str | None
    """Changed rows of views, as JSON, in a stream's last row of a micro-batch."""
    entries: list[tuple[str, bytes | None]] | None
    """Written entries of the stream state, null for a deleted one, in the same row as `changes`."""
    accepted_offset: int | None
    """Offset of the stream's last accepted record, in the same row as `changes`."""
    wire: str | None
    """Key and headers, as JSON in base64, if the other columns do not contain them."""
    mac_key: str | None
    """Name of the key of the record's MAC: `<id of the master key>:<proofs>/<signer>`."""
    mac: str | None
    """MAC of the record in hex."""


COLUMNS: Final = LedgerRow._fields


class _NoEnvelope:
    """Stands for the headers of a record that cannot be read."""

    door = principal = ce_id = type = mac_key = mac = None


_UNREAD: Final = _NoEnvelope()


class _Wire(msgspec.Struct, frozen=True):
    """The column `wire`. In JSON, bytes are base64."""

    key: bytes | None
    headers: list[tuple[str, bytes | None]]


def ledger_row(
    record: Record,
    settled: Settled,
    keyring: Keyring,
    changes: Collection[AppliedChange] = (),
    writes: Writes | None = None,
    accepted_offset: int | None = None,
) -> LedgerRow:
    """Return the ledger row of one settled record. If its value is masked, the original is sealed.

    The last three arguments describe the effect of a whole micro-batch on the stream. Pass them only for the
    stream's last record of the micro-batch.

    Args:
        record: the record as it was read from Kafka.
        settled: the result of the fold for the record.
        keyring: the master keys that seal the original of a masked value.
        changes: the changed rows of views, the last change for each row.
        writes: the changed entries of the stream state. `None` means none.
        accepted_offset: the offset of the stream's last accepted record.
    """
    envelope = settled.envelope or _UNREAD
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
        envelope.door,
        envelope.principal,
        envelope.ce_id,
        envelope.type,
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
        _to_json(list(changes)).decode("utf-8") if changes else None,
        sorted(writes.items()) if writes else None,
        accepted_offset,
        _wire_of(record, settled),
        envelope.mac_key,
        envelope.mac,
    )


def _wire_of(record: Record, settled: Settled) -> str | None:
    # A record without a stream's key is shown as one that a door refused.
    is_keyed = settled.stream_kind != REFUSED or parse_stream_key(record.key) is not None
    if settled.envelope is not None and is_keyed and record.header_names in _USUAL_HEADERS:
        return None
    headers = list(zip(record.header_names, record.header_values, strict=True))
    return _to_json(_Wire(record.key, headers)).decode("utf-8")


def record_of_row(row: LedgerRow, keyring: Keyring) -> Record:
    """Return the Kafka record of which a ledger row was made, for a refold.

    It equals the original in everything that the fold reads. `ce_time` and `content-type`, which the fold does
    not read, are empty.

    Args:
        row: a row of the ledger. Only the columns `RECORD_COLUMNS` must be read; the others may be None.
        keyring: the master keys that open a sealed value.

    Raises:
        UnsealError: no master key opens the sealed value.
        ValueError: the column `wire` is invalid.
    """
    value = row.value
    if row.value_sealed is not None:
        value = keyring.open(row.value_sealed, value_purpose(row.topic, row.partition, row.offset))
    if row.wire is not None:
        wire = _parsed_wire(row.wire)
        key, headers = wire.key, wire.headers
    else:
        key = f"{row.stream_kind}/{row.stream_id}".encode("ascii")
        source = f"{row.door}/{row.principal}"
        texts = ["1.0", row.ce_id, source, row.type, "", None, ""]
        if row.mac_key is not None:
            texts += (row.mac_key, row.mac)
        pairs = zip(MAC_HEADERS, texts, strict=False)
        headers = [(name, key if text is None else text.encode("utf-8")) for name, text in pairs]
    names, values = tuple(name for name, _ in headers), tuple(raw for _, raw in headers)
    return Record(row.topic, row.partition, row.offset, row.logged_at, key, value, names, values)


def _parsed_wire(text: str) -> _Wire:
    try:
        return msgspec.json.decode(text, type=_Wire)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"wire: not key and headers: {error}") from None
