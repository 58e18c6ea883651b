"""The fold of `control/<name>`: what the operators' programs say about the log itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from schemas.fold.entries import Entries
from schemas.fold.settled import Outcome, accepted, duplicate, rejected
from schemas.streams.control.organism import ORGANISM, ORGANISM_MODELS
from schemas.streams.control.organism_fold import settle_organism
from schemas.wire.ids import CONTROL, stream_key
from schemas.wire.record import (
    CONTROL_FOLD_SWITCHED,
    CONTROL_TOPOLOGY,
    Envelope,
    OutgoingRecord,
    Record,
    content_id,
)
from schemas.wire.strict_json import canonical
from schemas.wire.verdicts import MALFORMED, SEQ_CONFLICT, UNKNOWN_STREAM
from schemas.wire.wire_body import WireBody, body_fault

TOPOLOGY: Final = "topology"
TOPOLOGY_STREAM: Final = stream_key(CONTROL, TOPOLOGY)
FOLD: Final = "fold"
FOLD_STREAM: Final = stream_key(CONTROL, FOLD)
_DECLARED: Final = "declared"
_SWITCHED: Final = "switched"


def topology_record(partitions: int, epoch: int) -> OutgoingRecord:
    """The log's first record: how many partitions it has and which epoch it is.

    Which partition a stream lives in hangs on the count, so every program compares before it starts.
    """
    value = canonical({"schema_version": 1, "partitions": partitions, "epoch": epoch})
    return OutgoingRecord(
        stream=TOPOLOGY_STREAM,
        ce_id=content_id(CONTROL_TOPOLOGY.encode(), value),
        door="stack",
        principal="operator",
        type=CONTROL_TOPOLOGY,
        value=value,
    )


class FoldSwitched(WireBody):
    """The body of `control.fold_switched`. `offsets`: per partition of the log, the first one after what the
    earlier version has settled.
    """

    from_version: int
    to_version: int
    offsets: dict[str, int]


def switched_record(body: FoldSwitched) -> OutgoingRecord:
    """The record that says that a version was switched on; the same switch has the same id."""
    value = canonical(body.model_dump())
    return OutgoingRecord(
        stream=FOLD_STREAM,
        ce_id=content_id(CONTROL_FOLD_SWITCHED.encode(), value),
        door="stack",
        principal="operator",
        type=CONTROL_FOLD_SWITCHED,
        value=value,
    )


def records_left(
    reached: Mapping[str, Mapping[str, int]], ends: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """How many records of the log each part lacks, by partition, of those that must hold it before a version is
    switched on; nothing for a part that holds it.

    `reached`: per part and partition the first offset that it does not have; `ends`: per partition that of the
    log.
    """
    return {
        part: {p: end - reached[part].get(p, 0) for p, end in ends.items() if end > reached[part].get(p, 0)}
        for part in ("ledger", "views")
    }


def is_recorded(record: OutgoingRecord, entries: Entries) -> bool:
    """Whether the last switch that the entries of FOLD_STREAM know is this record's."""
    return entries.get(_SWITCHED) == record.value


def settle_control(
    record: Record, name: str, envelope: Envelope, body: dict[str, Any], entries: Entries
) -> Outcome:
    """Settle one record of a control stream. The first topology counts; a different one is a conflict. The
    fold's version only rises.
    """
    if name == ORGANISM:
        model = ORGANISM_MODELS.get(envelope.type)
        fault = "ce_type: no type of this stream" if model is None else body_fault(model, body)
        return settle_organism(record, envelope, body, entries) if fault is None else rejected(MALFORMED, fault)
    if name == FOLD:
        if envelope.type != CONTROL_FOLD_SWITCHED:
            return rejected(MALFORMED, "ce_type: no type of this stream")
        return _settle_switch(body, entries)
    if name != TOPOLOGY or envelope.type != CONTROL_TOPOLOGY:
        return rejected(UNKNOWN_STREAM, "no such control stream")
    numbers = [body.get("partitions"), body.get("epoch")]
    if set(body) != {"schema_version", "partitions", "epoch"} or any(type(n) is not int for n in numbers):
        return rejected(MALFORMED, "expected schema_version, partitions and epoch")
    declared = entries.get(_DECLARED)
    if declared is None:
        entries.put(_DECLARED, canonical(body))
        return accepted(None)
    if declared == canonical(body):
        return duplicate(None)
    return rejected(SEQ_CONFLICT, "another topology was declared before; a new one needs a new topic")


def _settle_switch(body: dict[str, Any], entries: Entries) -> Outcome:
    fault = body_fault(FoldSwitched, body)
    if fault is not None:
        return rejected(MALFORMED, fault)
    before = entries.get(_SWITCHED)
    if before == canonical(body):
        return duplicate(None)
    if body["to_version"] <= max(body["from_version"], _to_version(before)):
        return rejected(SEQ_CONFLICT, "that version, or a newer one, was switched on before")
    entries.put(_SWITCHED, canonical(body))
    return accepted(None)


def _to_version(switched: bytes | None) -> int:
    return 0 if switched is None else int(orjson.loads(switched)["to_version"])
