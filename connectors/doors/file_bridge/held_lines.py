"""Recipients whose mailbox takes no line at present: from which line on they have to get the rest (LM-08).

Such a recipient is *held*. Its lines stay in the queue, and the bridge goes on with those of other recipients.
The place of its first line that was not posted is a cursor like those of consumers, so an expire adjusts it. A
place is an offset in `messages.jsonl`, in bytes. A held recipient is tried again at growing intervals, and each
key that fails has a pause of its own.

Here are also the values about lines while they are carried: what was read, posted and refused.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

import structlog

from connectors.plumbing.network.rates import Backoff, TokenBuckets
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


# The pauses before a session or a reader that failed is tried again: the first, and the longest.
_PUT_OFF_S: Final = (0.5, 5.0)
# A lock that another program has, or a file that it replaces, makes an attempt fail or two.
_STUCK: Final = 3
# The pauses before a mailbox that took no more is tried again, with one line at first.
_HELD_FIRST_S: Final = 0.5
_HELD_MOST_S: Final = 60.0
_LINES_MOST: Final = 1000
# So many lines about held recipients are logged in a minute.
_LOGGED_A_MINUTE: Final = 20
# The reason of a recipient that the files name as held, and that this bridge has not tried yet.
NOT_TRIED: Final = "not_tried"

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Failing:
    pauses: Backoff = field(default_factory=lambda: Backoff(*_PUT_OFF_S))
    until: float = -math.inf
    failures: int = 0
    why: str | None = None


class PutOff(Generic[Key]):
    """A registry of pauses after failures, one for each key, so that one failing key does not delay the others.

    A key names the thing that failed, such as a session. `report` is called with the key and the error's text
    after a failure, but not again while the text stays the same. Nothing here blocks: the caller asks `waits`.
    """

    def __init__(self, report: Callable[[Key, str], object]) -> None:
        self._report = report
        self._failing: dict[Key, _Failing] = {}

    def waits(self, key: Key) -> bool:
        """Return whether the pause of `key` after its last failure is not over yet."""
        return key in self._failing and time.monotonic() < self._failing[key].until

    def failed(self, key: Key, error: Exception) -> None:
        """Begin a pause for `key` after a failure, and report the error if its text is new for this key.

        Failures in a row make the pause longer, up to five seconds.
        """
        found = self._failing.setdefault(key, _Failing())
        found.until = time.monotonic() + found.pauses.next_s()
        found.failures += 1
        why = str(error)
        if found.why != why:
            found.why = why
            self._report(key, why)

    def went_well(self, key: Key) -> None:
        """End the pause of `key` after a success. Its next failure is reported again."""
        self._failing.pop(key, None)

    def stuck(self) -> dict[Key, str]:
        """Return the keys that failed at least three times in a row, with the last error."""
        return {key: str(one.why) for key, one in self._failing.items() if one.failures >= _STUCK}

    def keep(self, keys: Collection[Key]) -> None:
        """Remove the pauses of all keys that are not in `keys`, the keys of all things that still exist."""
        for key in self._failing.keys() - set(keys):
            del self._failing[key]


class HeldKey(NamedTuple):
    """A recipient that is held in a session of the queue."""

    session: str
    recipient: str


@dataclass
class _Held:
    why: str
    until: float
    pause_s: float = _HELD_FIRST_S
    lines: int = 1


class HeldRetries:
    """When held recipients are tried again, and with how many lines.

    The first attempt is made with one line. Each attempt that posts all its lines doubles them, and each that
    posts none doubles the pause, from half a second to a minute. So a mailbox that stays full costs one record
    a minute, and one that was emptied gets its lines quickly.

    Args:
        clock: Returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[HeldKey, _Held] = {}
        self._logged: TokenBuckets[str] = TokenBuckets(_LOGGED_A_MINUTE, _LOGGED_A_MINUTE / 60, clock)
        self._unlogged = 0

    def keep(self, session: str, recipients: Collection[str]) -> None:
        """Note which recipients are held in a session, by its files; those of others are forgotten."""
        for key in [key for key in self._held if key.session == session and key.recipient not in recipients]:
            self._free(key)
        for recipient in recipients:
            key = HeldKey(session, recipient)
            if key not in self._held:
                self._held[key] = _Held(NOT_TRIED, self._clock())
                self._log("recipient_held", key, NOT_TRIED)

    def forget(self, session: str) -> None:
        """Forget a session that was deleted."""
        self._held = {key: one for key, one in self._held.items() if key.session != session}

    def has(self, session: str, recipient: str) -> bool:
        """Return whether a recipient is held."""
        return HeldKey(session, recipient) in self._held

    def due(self, session: str) -> Iterator[tuple[str, int]]:
        """Yield the held recipients that are to be tried now, with the largest number of lines."""
        for key, one in list(self._held.items()):
            if key.session == session and one.until <= self._clock():
                yield key.recipient, one.lines

    def begin(self, session: str, refused: dict[str, str]) -> None:
        """Note recipients that were not held, and took no more now, with the reasons."""
        for recipient, why in refused.items():
            key = HeldKey(session, recipient)
            if key not in self._held:
                self._log("recipient_held", key, why)
            self._held[key] = _Held(why, self._clock() + _HELD_FIRST_S)

    def tried(self, session: str, recipient: str, carried: Carried) -> None:
        """Note the result of an attempt with a held recipient."""
        key = HeldKey(session, recipient)
        one = self._held.get(key)
        if one is None:
            return
        why = carried.held.get(recipient)
        if why is not None:
            one.pause_s = _HELD_FIRST_S if carried.lines else min(2 * one.pause_s, _HELD_MOST_S)
            one.why, one.lines, one.until = why, 1, self._clock() + one.pause_s
        elif carried.more:
            one.lines = min(2 * one.lines, _LINES_MOST)
        else:
            self._free(key)

    def reasons(self) -> dict[str, dict[str, str]]:
        """Return by session why its held recipients are held, by their names."""
        found: dict[str, dict[str, str]] = {}
        for key, one in self._held.items():
            found.setdefault(key.session, {})[key.recipient] = one.why
        return found

    def _free(self, key: HeldKey) -> None:
        del self._held[key]
        self._log("recipient_free", key, None)

    def _log(self, event: str, key: HeldKey, why: str | None) -> None:
        if self._logged.take(event):
            self._unlogged += 1
            return
        level = log.info if why is None else log.warning
        level(event, session=key.session, recipient=key.recipient, why=why, unlogged=self._unlogged)
        self._unlogged = 0
