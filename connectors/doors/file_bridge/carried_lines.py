"""Values about the lines of a session while they are carried: what was read, posted and refused.

The place of a line is its offset in `messages.jsonl`, in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from connectors.doors.file_bridge.held_lines import digest
from schemas.wire.record import OutgoingRecord


class Consumed(NamedTuple):
    """The agents that have polled a session, and the recipients that are held there."""

    agents: list[str]
    held: list[str]


class Carried(NamedTuple):
    """The number of lines that were carried, and whether more lines wait.

    `held` are recipients whose mailbox took no more, with the reason, such as `mailbox_full`. `ids` are the
    messages that a held recipient got.
    """

    lines: int
    more: bool
    held: dict[str, str]
    ids: Sequence[str] = ()


class Posting(NamedTuple):
    """A record for the recipient of a line, whose place is `at`.

    `sent_s` is the time when its message was sent, in seconds since 1970 UTC. `is_hopeless`: its body alone is
    longer than all that may wait in the mailbox. `blob_bytes` is the length of the blob that has it, or 0.
    """

    record: OutgoingRecord
    at: int
    recipient: str | None = None
    sent_s: float | None = None
    is_hopeless: bool = False
    blob_bytes: int = 0


@dataclass
class Reading:
    """How far a file was read.

    `lines` are the digests of the lines in order, and `starts` their places. `more`: there are more lines.
    """

    end: int
    lines: list[bytes] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    more: bool = False

    @property
    def places(self) -> list[int]:
        """The place of each line, and at the end the one after the last line."""
        return [*self.starts, self.end]

    def add(self, start: int, end: int, line: bytes | None) -> None:
        """Note a line that was read."""
        self.starts.append(start)
        self.lines.append(digest(line))
        self.end = end


class Refused:
    """The recipients that take no more, each with the place of the first line that it lacks and the reason.

    `before` are those that were held before, with their places.
    """

    def __init__(self, before: dict[str, int]) -> None:
        self.before = before
        self.new: dict[str, tuple[int, str]] = {}

    def lacks(self, recipient: str, at: int) -> bool:
        """Return whether the recipient has to get the line at this place later."""
        return recipient in self.new or self.before.get(recipient, at + 1) <= at

    def add(self, recipient: str, at: int, why: str) -> None:
        """Note that a recipient has not got the line at this place."""
        known = self.new.get(recipient)
        if known is None or at < known[0]:
            self.new[recipient] = (at, why)

    def reasons(self) -> dict[str, str]:
        """Return why each recipient takes no more."""
        return {recipient: why for recipient, (_, why) in self.new.items()}
