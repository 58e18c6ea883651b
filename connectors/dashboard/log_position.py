"""A place in the log as an event's id: the next offset of each partition, the same at every gateway."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from connectors.live.settled_feed import SettledRecord

LENGTH_LIMIT: Final = 16 * 1024
_FORM: Final = re.compile(r"e(\d{1,9}):((?:\d{1,15}\.)*\d{1,15})").fullmatch


class LogPosition:
    """Next offsets by partition, of one epoch of the topic."""

    def __init__(self, epoch: int, offsets: Mapping[int, int]) -> None:
        self.epoch = epoch
        self.offsets = dict(offsets)

    def __str__(self) -> str:
        return f"e{self.epoch}:" + ".".join(str(self.offsets[number]) for number in sorted(self.offsets))

    def copy(self) -> LogPosition:
        """The same place, to go on from."""
        return LogPosition(self.epoch, self.offsets)

    def advance(self, records: Iterable[SettledRecord]) -> None:
        """Go on to behind these records."""
        for record in records:
            partition, offset = record.position
            self.offsets[partition] = max(self.offsets.get(partition, 0), offset + 1)

    def is_ahead_of(self, other: LogPosition) -> bool:
        """Whether this one is beyond the other in any partition."""
        return any(offset > other.offsets.get(number, 0) for number, offset in self.offsets.items())

    def up_to(self, other: LogPosition) -> dict[int, tuple[int, int]]:
        """By partition, what is missing from here to the other: first offset, and the end."""
        return {
            number: (offset, other.offsets[number])
            for number, offset in self.offsets.items()
            if offset < other.offsets[number]
        }


def parsed_position(text: str, epoch: int, partitions: int) -> LogPosition | None:
    """The position that a reader has sent; None for what is none of this log."""
    found = _FORM(text) if len(text) <= LENGTH_LIMIT else None
    if found is None or int(found[1]) != epoch:
        return None
    offsets = [int(number) for number in found[2].split(".")]
    return LogPosition(epoch, dict(enumerate(offsets))) if len(offsets) == partitions else None
