"""The fold of `control/<name>`: what the operators' programs say about the log itself."""

from __future__ import annotations

from typing import Any, Final

from schemas.entries import Entries
from schemas.ids import CONTROL, stream_key
from schemas.record import CONTROL_TOPOLOGY, Envelope, OutgoingRecord, content_id
from schemas.settled import Outcome, accepted, duplicate, rejected
from schemas.strict_json import canonical
from schemas.verdicts import MALFORMED, SEQ_CONFLICT, UNKNOWN_STREAM

TOPOLOGY: Final = "topology"
TOPOLOGY_STREAM: Final = stream_key(CONTROL, TOPOLOGY)
_DECLARED: Final = "declared"


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


def settle_control(name: str, envelope: Envelope, body: dict[str, Any], entries: Entries) -> Outcome:
    """Settle one record of a control stream. The first topology counts; a different one is a conflict."""
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
