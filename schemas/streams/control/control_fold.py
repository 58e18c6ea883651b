"""The fold of the streams `control/<name>`: topology, fold version and MACs of the log; listeners; limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import orjson

from schemas.fold.entries import Entries
from schemas.fold.settled import Outcome, accepted, duplicate, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.streams.control.limits import LIMIT_MODELS, LIMITS, LimitRow, settle_limits
from schemas.streams.control.organism import ORGANISM, ORGANISM_MODELS, ListenerRow, settle_organism
from schemas.streams.control.record_macs import MAC_MODELS, MACS, settle_macs
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import WireBody, body_fault
from trunkline_agent.wire.ids import CONTROL, stream_key
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.verdicts import MALFORMED, SEQ_CONFLICT, UNKNOWN_STREAM

CONTROL_TOPOLOGY: Final = "control.topology"
CONTROL_FOLD_SWITCHED: Final = "control.fold_switched"

TOPOLOGY: Final = "topology"
TOPOLOGY_STREAM: Final = stream_key(CONTROL, TOPOLOGY)
FOLD: Final = "fold"
FOLD_STREAM: Final = stream_key(CONTROL, FOLD)
_DECLARED: Final = "declared"
_SWITCHED: Final = "switched"
_TOPOLOGY_FAULT: Final = "expected schema_version, partitions and epoch"


class Topology(WireBody):
    """Body of `control.topology`, the log's first record: the log's partition count and epoch."""

    TYPE: ClassVar = CONTROL_TOPOLOGY
    STREAM: ClassVar = TOPOLOGY_STREAM

    partitions: int
    epoch: int


class FoldSwitched(WireBody):
    """Body of `control.fold_switched`: the fold version `to_version` settles the rest of the log.

    `offsets` has for each partition the first offset that the version `from_version` did not settle.
    """

    TYPE: ClassVar = CONTROL_FOLD_SWITCHED
    STREAM: ClassVar = FOLD_STREAM

    from_version: int
    to_version: int
    offsets: dict[str, int]


def records_left(
    reached: Mapping[str, Mapping[str, int]], ends: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Return how many records of the log are not yet in the ledger and not yet in the views.

    Both must contain the whole log before the fold version is switched. Partitions are given as texts, such as
    `"0"`.

    Args:
        reached: for `ledger` and for `views`, the first offset of each partition that is missing there. An
            absent partition counts as 0.
        ends: the end offset of each partition of the log.

    Returns:
        For `ledger` and for `views`, the number of missing records by partition. Complete partitions are
        absent, so two empty mappings mean that nothing is missing.
    """
    return {
        part: {p: end - reached[part].get(p, 0) for p, end in ends.items() if end > reached[part].get(p, 0)}
        for part in ("ledger", "views")
    }


def is_recorded(record: OutgoingRecord, entries: Entries) -> bool:
    """Return whether the log has accepted the switch of the fold version in `record` as its last switch.

    `record` is one of a `FoldSwitched`, and `entries` is the state of the stream `control/fold`. False
    means that the caller must append `record`.
    """
    return entries.get(_SWITCHED) == record.value


def settle_control(given: FoldInput) -> Outcome:
    """Settle a record of `control/<name>`: check the body, update the state, return verdict and changed rows.

    The name decides what the record is about: `topology`, `fold`, `organism`, `limits` or `macs-<partition>`.
    The first topology is valid for good; a different one is rejected as `seq_conflict`. The fold version can
    only increase. The changes of the stream state, `given.entries`, count only if the record is accepted.
    """
    name = MACS if given.name.startswith(MACS) else given.name
    settle = _SETTLE_BY_NAME.get(name)
    if settle is None or (name == TOPOLOGY and given.type != CONTROL_TOPOLOGY):
        return rejected(UNKNOWN_STREAM, "no such control stream")
    model = _MODELS_BY_NAME[name].get(given.type)
    fault = "ce_type: no type of this stream" if model is None else body_fault(model, given.body)
    if fault is None:
        return settle(given)
    return rejected(MALFORMED, _TOPOLOGY_FAULT if given.name == TOPOLOGY else fault)


def _settle_topology(given: FoldInput) -> Outcome:
    declared, body = given.entries.get(_DECLARED), canonical(given.body)
    if declared is None:
        given.entries.put(_DECLARED, body)
        return accepted(None)
    if declared == body:
        return duplicate(None)
    return rejected(SEQ_CONFLICT, "another topology was declared before; a new one needs a new topic")


def _settle_switch(given: FoldInput) -> Outcome:
    before, body = given.entries.get(_SWITCHED), canonical(given.body)
    if before == body:
        return duplicate(None)
    if given.body["to_version"] <= max(given.body["from_version"], _to_version(before)):
        return rejected(SEQ_CONFLICT, "that version, or a newer one, was switched on before")
    given.entries.put(_SWITCHED, body)
    return accepted(None)


def _to_version(switched: bytes | None) -> int:
    return 0 if switched is None else int(orjson.loads(switched)["to_version"])


_SETTLE_BY_NAME: Final = {
    TOPOLOGY: _settle_topology,
    FOLD: _settle_switch,
    ORGANISM: settle_organism,
    MACS: settle_macs,
    LIMITS: settle_limits,
}
_MODELS_BY_NAME: Final[dict[str, dict[str, type[WireBody]]]] = {
    TOPOLOGY: {CONTROL_TOPOLOGY: Topology},
    FOLD: {CONTROL_FOLD_SWITCHED: FoldSwitched},
    ORGANISM: ORGANISM_MODELS,
    MACS: MAC_MODELS,
    LIMITS: LIMIT_MODELS,
}
CONTROL_KIND: Final = StreamKind(
    name=CONTROL,
    models={name: model for models in _MODELS_BY_NAME.values() for name, model in models.items()},
    settle=settle_control,
    row_of_each_stream=(),
    later_rows=(ListenerRow, LimitRow),
    checks_bodies=True,
)
