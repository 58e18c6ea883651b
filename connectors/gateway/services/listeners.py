"""The listeners there are, and what waits for each, in the order in which pumps get it (XP-05, XP-08).

Senders take turns; within a sender the oldest comes first, and high priority before normal before low. What
was handed out before waits apart: its handler may have ended a pump, and it is to run alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from connectors.live.settled_feed import SettledRecord
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import MAILBOX_VIEW, REGISTRY_LISTENERS, ListenerRow, MessageRow, Row
from schemas.streams.control.organism import ORGANISM_STREAM
from schemas.streams.control.organism_fold import organism_version
from schemas.streams.principal.principals import ACTIVE
from schemas.wire.message import DEFAULT_REALM, LEASED, PRIORITIES, UNREAD
from schemas.wire.verdicts import ACCEPTED

_MINUTE_S: Final = 60.0
_DIGITS: Final = {priority: digit for digit, priority in enumerate(PRIORITIES)}
_Key = tuple[int, str]
"""When a message was posted, and its id."""


class Queue:
    """What waits for one listener, what is leased from it, and when it was handed something lately."""

    def __init__(self) -> None:
        self._by_sender: list[OrderedDict[str, list[_Key]]] = [OrderedDict() for _ in PRIORITIES]
        self._places: dict[str, tuple[int, str, _Key]] = {}
        self._suspects: dict[str, _Key] = {}
        self.held: set[str] = set()
        self.handed: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._places) + len(self._suspects)

    @property
    def suspects(self) -> int:
        """How many wait that were handed out before."""
        return len(self._suspects)

    def of_sender(self, sender: str) -> int:
        """How many of a sender's messages wait."""
        return sum(len(senders.get(sender, ())) for senders in self._by_sender)

    def take_in(self, row: MessageRow) -> None:
        """Note how a message stands now."""
        self.remove(row.message_id)
        if row.status == UNREAD:
            key = (row.posted_at, row.message_id)
            if row.attempts:
                self._suspects[row.message_id] = key
                return
            digit = _DIGITS[row.priority]
            insort(self._by_sender[digit].setdefault(row.sender, []), key)
            self._places[row.message_id] = (digit, row.sender, key)
        elif row.status == LEASED:
            self.held.add(row.message_id)
            if row.handed_at is not None:
                self.handed.append(row.handed_at)
                while self.handed[0] <= row.handed_at - _MINUTE_S * 1e6:
                    self.handed.popleft()

    def remove(self, message_id: str) -> None:
        """The message does not wait any more, and is not leased."""
        self.held.discard(message_id)
        self._suspects.pop(message_id, None)
        place = self._places.pop(message_id, None)
        if place is not None:
            digit, sender, key = place
            keys = self._by_sender[digit][sender]
            del keys[bisect_left(keys, key)]
            if not keys:
                del self._by_sender[digit][sender]

    def take(self, most: int) -> list[str]:
        """Take out up to `most` that were never handed out, each sender in turn."""
        taken: list[str] = []
        for senders in self._by_sender:
            while senders and len(taken) < most:
                sender, keys = senders.popitem(last=False)
                _, message_id = keys.pop(0)
                del self._places[message_id]
                taken.append(message_id)
                if keys:
                    senders[sender] = keys  # and waits for its next turn
        return taken

    def take_suspect(self) -> str | None:
        """Take out the oldest of those that were handed out before."""
        if not self._suspects:
            return None
        oldest = min(self._suspects, key=self._suspects.__getitem__)
        del self._suspects[oldest]
        return oldest

    def may_hand_out(self, per_minute: int | None, now_s: float) -> int:
        """How many more the rate allows now, by this machine's clock; the log's decides."""
        if per_minute is None:
            return len(self)
        while self.handed and self.handed[0] <= (now_s - _MINUTE_S) * 1e6:
            self.handed.popleft()
        return max(0, per_minute - len(self.handed))


class Listeners:
    """Rows by name, queues by name, and a wake-up for who waits. One thread changes, any thread looks up.

    `rows_of`: the messages that wait in a mailbox, for a listener that comes to one that is there.
    """

    def __init__(
        self,
        entries: Callable[[str], Entries],
        rows_of: Callable[[str], Iterable[MessageRow]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._entries = entries
        self._rows_of = rows_of
        self.clock = clock
        self._lock = threading.Lock()
        self._rows: dict[str, ListenerRow] = {}
        self._queues: dict[str, Queue] = {}
        self._version = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._changes = 0

    def load(self, listeners: Iterable[Row]) -> None:
        """Take in what the live view held when it was opened."""
        for row in listeners:
            if isinstance(row, ListenerRow):
                self._take_listener(row)
        self._version = organism_version(self._entries(ORGANISM_STREAM))

    def changed(self, change: AppliedChange) -> None:
        """Take in a change of the live view."""
        if change.view == REGISTRY_LISTENERS and isinstance(change.row, ListenerRow):
            self._take_listener(change.row)
        elif change.view == MAILBOX_VIEW and isinstance(change.row, MessageRow):
            row = change.row
            with self._lock:
                queue = self._queues.get(row.recipient) if row.realm == DEFAULT_REALM else None
                if queue is None:
                    return
                queue.take_in(row)
            self.wake()

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """See whether the organism was changed, also where no listener is another now."""
        if any(record.stream == ORGANISM_STREAM and record.verdict == ACCEPTED for record in records):
            self._version = organism_version(self._entries(ORGANISM_STREAM))
            self.wake()

    @property
    def version(self) -> int:
        """How many changes of the organism there were."""
        return self._version

    def active(self) -> list[ListenerRow]:
        """The listeners there are, by name."""
        return sorted((r for r in list(self._rows.values()) if r.status == ACTIVE), key=lambda r: r.listener)

    def removed(self) -> list[ListenerRow]:
        """Those that are not any more."""
        return sorted((r for r in list(self._rows.values()) if r.status != ACTIVE), key=lambda r: r.listener)

    def row(self, name: str) -> ListenerRow | None:
        """A listener's row, also of one that was removed."""
        return self._rows.get(name)

    def of_tag(self, root_tag: str) -> list[ListenerRow]:
        """Who takes messages of this root tag."""
        return [row for row in self.active() if row.root_tag == root_tag]

    def waiting(self, name: str) -> int:
        """How many messages wait for a listener."""
        with self._lock:
            queue = self._queues.get(name)
            return 0 if queue is None else len(queue)

    def waiting_of(self, name: str, sender: str) -> int:
        """How many of one sender's."""
        with self._lock:
            queue = self._queues.get(name)
            return 0 if queue is None else queue.of_sender(sender)

    def held(self, name: str) -> int:
        """How many of a listener's messages are leased."""
        with self._lock:
            queue = self._queues.get(name)
            return 0 if queue is None else len(queue.held)

    def held_ids(self, name: str) -> list[str]:
        """Which of a listener's messages are leased."""
        with self._lock:
            queue = self._queues.get(name)
            return [] if queue is None else list(queue.held)

    def suspects(self, names: Iterable[str]) -> int:
        """How many messages wait for these listeners that were handed out before."""
        with self._lock:
            return sum(self._queues[name].suspects for name in names if name in self._queues)

    def take(self, row: ListenerRow, most: int) -> list[str]:
        """Take up to `most` messages of a listener out of its queue, as many as it may have now; who does not
        lease them gives them back.
        """
        with self._lock:
            queue = self._queues[row.listener]
            places = min(most, row.concurrency - len(queue.held))
            return queue.take(max(0, min(places, queue.may_hand_out(row.per_minute, self.clock()))))

    def take_suspect(self, row: ListenerRow) -> str | None:
        """Take one that was handed out before, if the listener may have one now."""
        with self._lock:
            queue = self._queues[row.listener]
            may = len(queue.held) < row.concurrency and queue.may_hand_out(row.per_minute, self.clock()) > 0
            return queue.take_suspect() if may else None

    def take_all(self, name: str, most: int) -> list[str]:
        """Take what waits for a listener that was removed."""
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                return []
            taken = queue.take(most)
            while len(taken) < most and (suspect := queue.take_suspect()) is not None:
                taken.append(suspect)
            return taken

    def give_back(self, name: str, read: Callable[[], Sequence[MessageRow]]) -> None:
        """What was taken and not leased waits again, as it stands now. `read` is called where no change comes
        in between: a row is written before its change is told.
        """
        with self._lock:
            queue = self._queues.get(name)
            if queue is not None:
                for row in read():
                    queue.take_in(row)
        self.wake()

    async def wait_change(self, seen: int, timeout_s: float) -> None:
        """Return when something has changed since `changes` was `seen`, or after `timeout_s`."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._changes != seen:
                return
            future = loop.create_future()
            self._waiting.append((loop, future))
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            with self._lock:
                self._waiting = [one for one in self._waiting if one[1] is not future]

    @property
    def changes(self) -> int:
        """A number that rises with each change."""
        return self._changes

    def wake(self) -> None:
        """Wake who waits."""
        with self._lock:
            self._changes += 1
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(_resolve, future)

    def _take_listener(self, row: ListenerRow) -> None:
        with self._lock:
            known = self._rows.get(row.listener)
            # What came by `changed` before `load` is newer.
            if known is not None and (known.removed_at or known.added_at) > (row.removed_at or row.added_at):
                return
            self._rows[row.listener] = row
            if row.listener not in self._queues:
                queue = self._queues[row.listener] = Queue()
                for message in sorted(self._rows_of(row.listener), key=lambda one: one.handed_at or 0):
                    queue.take_in(message)
        self.wake()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
