"""Recipients whose mailbox takes no line at present: from which line on they have to get the rest (LM-08).

Such a recipient is *held*. Its lines stay in the queue, and the bridge goes on with those of other recipients.
The place of its first line that was not posted is a cursor like those of consumers, so an expire adjusts it. A
place is an offset in `messages.jsonl`, in bytes.

Here are also the values about lines while they are carried: what was read, posted and refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from schemas.wire.record import OutgoingRecord
from trunkline_agent.queue.cursors import SUFFIX, agents, read_cursor, write_cursor
from trunkline_agent.queue.message_record import is_name
from trunkline_agent.queue.queue_errors import QueueError
from trunkline_agent.queue.session_files import CURSORS, SessionFolder, complete_lines, remove

log = structlog.stdlib.get_logger(__name__)

# The bridge's name as a consumer.
CONSUMER: Final = "trunkline-bridge"
PREFIX: Final = "trunkline-held."


class NotHeld(QueueError):
    """A mailbox takes no line, and the name of the recipient is too long for a cursor. The session waits."""


def held_recipients(names: Sequence[str]) -> list[str]:
    """Return the recipients that are held, given the names of all cursors of a session."""
    return [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]


def held_cursors(folder: SessionFolder) -> dict[str, int]:
    """Return the place of each held recipient: the offset in `messages.jsonl` of the first line that it lacks.

    The caller has the session's lock. An invalid cursor counts as 0: posting a line again does no harm.
    """
    found: dict[str, int] = {}
    for recipient in held_recipients(agents(folder)):
        try:
            offset = read_cursor(folder, PREFIX + recipient)
        except QueueError:
            offset = 0
        if offset is not None:
            found[recipient] = offset
    return found


def own_cursor(folder: SessionFolder) -> int | None:
    """Return the bridge's cursor. An invalid one counts as none: carrying a line again does no harm."""
    try:
        return read_cursor(folder, CONSUMER)
    except QueueError:
        log.warning("cursor_not_whole", session=folder.path.rpartition("/")[2])
        return None


def hold(folder: SessionFolder, recipient: str, offset: int) -> None:
    """Hold a recipient from the line at `offset` on; from an earlier one if it is held from there already.

    The caller has the session's lock. Raises NotHeld, and OSError if the cursor cannot be written.
    """
    name = PREFIX + recipient
    if not is_name(name):
        raise NotHeld(f"the mailbox of {recipient} takes no message, and its name is too long to go on without")
    known = held_cursors(folder).get(recipient)
    if known is None or offset < known:
        write_cursor(folder, name, offset)


def move_held(folder: SessionFolder, recipient: str, offset: int | None) -> None:
    """Move the place of a held recipient, or let it go (None). The caller has the session's lock."""
    if offset is not None:
        write_cursor(folder, PREFIX + recipient, offset)
        return
    with folder.open_folder(CURSORS) as cursors:
        remove(PREFIX + recipient + SUFFIX, cursors)


def places_of(fd: int, start: int, size: int, lines: Sequence[bytes]) -> list[int]:
    """Return where lines are that were read before an expire replaced the file.

    Args:
        fd: The descriptor of the new file.
        start: The offset in it at which the reading of the old file began.
        size: The length of the new file in bytes.
        lines: The digests of the lines that were read, in order.

    Returns:
        The offset of each line in the new file. A removed line has the offset of the first later line that
        stayed. At the end is the offset after the last line.
    """
    places: list[int] = []
    end = start
    for line_start, line_end, line in complete_lines(fd, start, size):
        try:
            found = lines.index(digest(line), len(places))
        except ValueError:
            break
        places += [line_start] * (found + 1 - len(places))
        end = line_end
    return places + [end] * (len(lines) + 1 - len(places))


def digest(line: bytes | None) -> bytes:
    """Return a digest of a line; None stands for a line that was too long to read."""
    return hashlib.blake2b(line or b"", digest_size=16).digest()


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
