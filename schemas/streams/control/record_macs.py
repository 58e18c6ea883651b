"""The stream `control/macs-<partition>`: whether the records of a Kafka partition need a MAC.

Each partition has such a stream. From its first record on, the records of the partition need a MAC. Records
that were logged before stand. A later record ends the MACs under one master key.

Entries:
`rules`: the partition count of the log, and the ids of the master keys whose MACs count no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, ClassVar, Final

import msgspec
from pydantic import Field

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.settled import Outcome, accepted, duplicate, rejected
from schemas.fold.stream_kind import FoldInput
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import Name, WireBody, models_of
from trunkline_agent.wire.ids import CONTROL, stream_key
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, MALFORMED, UNKNOWN_STREAM

MACS: Final = "macs-"
MACS_REQUIRED: Final = "control.macs_required"
MAC_KEY_ENDED: Final = "control.mac_key_ended"
ENTRY_VERSION: Final = 1
_RULES: Final = "rules"


class MacsRequired(WireBody):
    """Body of `control.macs_required`: the later records of the partition `partition` need a MAC.

    `partitions` is the partition count of the log. From it follows the partition of each stream.
    """

    TYPE: ClassVar = MACS_REQUIRED
    STREAM: ClassVar = f"{CONTROL}/{MACS}{{partition}}"

    partition: Annotated[int, Field(ge=0)]
    partitions: Annotated[int, Field(ge=1)]


class MacKeyEnded(WireBody):
    """Body of `control.mac_key_ended`: MACs under the master key `key_id` count no more in this partition."""

    TYPE: ClassVar = MAC_KEY_ENDED
    STREAM: ClassVar = MacsRequired.STREAM

    partition: Annotated[int, Field(ge=0)]
    key_id: Name


MAC_MODELS: Final = models_of(MacsRequired, MacKeyEnded)


class MacRules(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The entry `rules`. `partitions` is the partition count, `ended` has the ids of ended master keys."""

    version: int
    partitions: int
    ended: tuple[str, ...] = ()


_ENTRY: Final = StructEntries(_RULES, MacRules)


@lru_cache(maxsize=1024)
def macs_stream(partition: int) -> str:
    """Return the key of the stream with the rules of a Kafka partition, `control/macs-<partition>`."""
    return stream_key(CONTROL, f"{MACS}{partition}")


def rules_of(macs: Entries) -> MacRules | None:
    """Return the rules in the state of a stream `control/macs-<partition>`; `None` if no MAC is required."""
    return _ENTRY.read(macs)


def macs_required_records(partitions: int) -> Iterator[OutgoingRecord]:
    """Yield the records after which each partition of the log requires MACs.

    `partitions` is the partition count of the log. A record that the log has already is a duplicate.
    """
    for partition in range(partitions):
        yield _in(partition, MacsRequired(partition=partition, partitions=partitions))


def mac_key_ended_records(partitions: int, key_id: str) -> Iterator[OutgoingRecord]:
    """Yield the records after which MACs under the master key `key_id` count no more, for each partition."""
    for partition in range(partitions):
        yield _in(partition, MacKeyEnded(partition=partition, key_id=key_id))


def _in(partition: int, body: WireBody) -> OutgoingRecord:
    return msgspec.structs.replace(body.record(door="stack", principal="operator"), partition=partition)


def settle_macs(given: FoldInput) -> Outcome:
    """Settle a record of `control/macs-<partition>`, whose body passed its model. Its MAC was checked before.

    The rules of a partition begin once, and a key ends for good. A record cannot end the key of its own MAC.
    """
    body, rules = given.body, rules_of(given.entries)
    partition = given.record.partition
    if body["partition"] != partition or given.name != f"{MACS}{partition}":
        return rejected(MALFORMED, "the record is about another partition")
    if given.type == MACS_REQUIRED:
        if rules is not None:
            return duplicate(None)
        return _accept(given, MacRules(ENTRY_VERSION, body["partitions"]))
    key_id = body["key_id"]
    if rules is None:
        return rejected(UNKNOWN_STREAM, "the partition does not require MACs")
    if key_id in rules.ended:
        return duplicate(None)
    if (given.envelope.mac_key or "").startswith(f"{key_id}:"):
        return rejected(ILLEGAL_TRANSITION, "the record's own MAC is under this key")
    return _accept(given, msgspec.structs.replace(rules, ended=(*rules.ended, key_id)))


def _accept(given: FoldInput, rules: MacRules) -> Outcome:
    _ENTRY.write(given.entries, rules)
    return accepted(None)
