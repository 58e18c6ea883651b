"""The XML pump's listeners, and for each the queue of the messages that wait for it (XP-05, XP-08).

Pumps get high priority before normal before low. Within a priority senders take turns, and each sender's oldest
message comes first. Redelivered messages (suspects) wait apart: each may have crashed a pump, so it must run
alone.
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

from connectors.hub.live.settled_feed import SettledRecord
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.streams.control.organism import ORGANISM_STREAM, ListenerRow, organism_version
from schemas.streams.mailboxes.message import DEFAULT_REALM, LEASED, PRIORITIES, UNREAD, MessageRow
from schemas.streams.principal.principals import ACTIVE
from trunkline_agent.wire.verdicts import ACCEPTED

_MINUTE_S: Final = 60.0
_DIGITS: Final = {priority: digit for digit, priority in enumerate(PRIORITIES)}
_Key = tuple[int, str]
"""The time at which a message was posted, and its id."""


class Queue:
    """The waiting messages of one listener, and the ids and times of its leases. Not thread-safe.

    `len()` of the queue is the number of waiting messages. A suspect is a waiting message that was leased
    before.

    Attributes:
        held: The ids of the leased messages.
        handed: The times of the leases in the last minute, in microseconds since 1970 UTC.
    """

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
        """The number of waiting messages that were leased before. Each of them may have crashed a pump."""
        return len(self._suspects)

    def of_sender(self, sender: str) -> int:
        """Return how many messages of one sender wait and were never leased. `sender` is a principal's name."""
        return sum(len(senders.get(sender, ())) for senders in self._by_sender)

    def add(self, row: MessageRow) -> None:
        """Update the queue with the present row of a message of this listener.

        A waiting message is queued, a leased one is counted as a lease, and one in any other state is removed.
        """
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
        """Remove a message, waiting or leased, from the queue. An unknown message id is ignored."""
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
        """Remove up to `most` messages that were never leased from the queue, and return their ids.

        High priority comes first. Within a priority the senders take turns. The list is empty if no such
        message waits.
        """
        taken: list[str] = []
        for senders in self._by_sender:
            while senders and len(taken) < most:
                sender, keys = senders.popitem(last=False)
                _, message_id = keys.pop(0)
                del self._places[message_id]
                taken.append(message_id)
                if keys:
                    senders[sender] = keys  # the sender's next turn comes last
        return taken

    def take_suspect(self) -> str | None:
        """Remove the oldest waiting message that was leased before from the queue, and return its id.

        Returns None if no such message waits.
        """
        if not self._suspects:
            return None
        oldest = min(self._suspects, key=self._suspects.__getitem__)
        del self._suspects[oldest]
        return oldest

    def leases_left(self, per_minute: int | None, now_s: float) -> int:
        """Return how many more messages may be leased now without more than `per_minute` leases in a minute.

        If `per_minute` is None, there is no limit, and the result is the number of waiting messages. `now_s` is
        this machine's time in seconds since 1970 UTC. The result is an estimate, because the fold checks the
        rate by the log's clock.
        """
        if per_minute is None:
            return len(self)
        while self.handed and self.handed[0] <= (now_s - _MINUTE_S) * 1e6:
            self.handed.popleft()
        return max(0, per_minute - len(self.handed))


_EMPTY: Final = Queue()


class Listeners:
    """All listeners of the XML pump with their queues of messages, kept up to date by the live view.

    Coroutines can wait for a change. Thread-safe for one thread that calls `changed` and `settled`, and any
    number of readers.

    Args:
        entries: Returns the stream state of the stream with this name, such as `control/organism`.
        rows_of: Returns the waiting and leased messages of the mailbox with this name.
    """

    follows = (ListenerRow, MessageRow)

    def __init__(
        self, entries: Callable[[str], Entries], rows_of: Callable[[str], Iterable[MessageRow]]
    ) -> None:
        self._entries = entries
        self._rows_of = rows_of
        self._lock = threading.Lock()
        self._rows: dict[str, ListenerRow] = {}
        self._queues: dict[str, Queue] = {}
        self._version = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._changes = 0

    def load(self, listeners: Iterable[ListenerRow]) -> None:
        """Add the listeners that the live view contains when it is open. Call it once, after `LiveView.open`.

        A listener that `changed` has already added is newer, so it is kept.
        """
        for row in listeners:
            self._add_listener(row)
        self._version = organism_version(self._entries(ORGANISM_STREAM))

    def changed(self, change: AppliedChange) -> None:
        """Update a listener, or the queue of a message's listener, when its row in the live view changes.

        The live view's thread calls this method for each changed row. Rows of other types, and messages to
        mailboxes without a listener, are ignored.
        """
        row = change.row
        if isinstance(row, ListenerRow):
            self._add_listener(row)
        elif isinstance(row, MessageRow) and row.realm == DEFAULT_REALM:
            with self._lock:
                queue = self._queues.get(row.recipient)
                if queue is None:
                    return
                queue.add(row)
            self.wake()

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Update `version` when a record of the stream `control/organism` was accepted.

        `changed` does not suffice, because such a record (a reload, for example) may change no listener. The
        live view's thread calls this method with each batch of settled records.
        """
        if any(record.stream == ORGANISM_STREAM and record.verdict == ACCEPTED for record in records):
            self._version = organism_version(self._entries(ORGANISM_STREAM))
            self.wake()

    @property
    def version(self) -> int:
        """The number of accepted commands that changed or reloaded the organism."""
        return self._version

    def active(self) -> list[ListenerRow]:
        """Return the rows of the present listeners, sorted by name. Removed listeners are left out."""
        return sorted((r for r in list(self._rows.values()) if r.status == ACTIVE), key=lambda r: r.listener)

    def removed(self) -> list[ListenerRow]:
        """Return the rows of the listeners that were removed, sorted by name."""
        return sorted((r for r in list(self._rows.values()) if r.status != ACTIVE), key=lambda r: r.listener)

    def row(self, name: str) -> ListenerRow | None:
        """Return the row of the listener with this name, or None if there never was one.

        The row of a removed listener is returned, too; its `status` is then not `active`.
        """
        return self._rows.get(name)

    def of_tag(self, root_tag: str) -> list[ListenerRow]:
        """Return the active listeners that take payloads with this root tag, sorted by name."""
        return [row for row in self.active() if row.root_tag == root_tag]

    def waiting(self, name: str) -> int:
        """Return how many messages wait for the listener `name`, whether leased before or not.

        The result is 0 for an unknown listener.
        """
        with self._lock:
            return len(self._queues.get(name, _EMPTY))

    def waiting_of(self, name: str, sender: str) -> int:
        """Return how many messages of one sender wait for the listener `name` and were never leased.

        `sender` is the name of a principal. The result is 0 for an unknown listener or sender.
        """
        with self._lock:
            return self._queues.get(name, _EMPTY).of_sender(sender)

    def held(self, name: str) -> list[str]:
        """Return the ids of a listener's messages that are leased to pumps now, in no order.

        The list is empty for an unknown listener.
        """
        with self._lock:
            return list(self._queues.get(name, _EMPTY).held)

    def suspects(self, names: Iterable[str]) -> int:
        """Return how many of the messages that wait for these listeners were leased before.

        Each of these messages may have crashed a pump, because its lease ended without an ack. `names` are
        names of listeners; unknown ones are ignored.
        """
        with self._lock:
            return sum(self._queues.get(name, _EMPTY).suspects for name in names)

    def take(self, row: ListenerRow, most: int) -> list[str]:
        """Remove up to `most` waiting messages from the queue of a listener, and return their ids.

        The listener's concurrency and rate bound the number; the list may be empty. Messages that were leased
        before are not taken. The caller then leases the messages by records, and calls `give_back` for those
        that it could not lease. Raises KeyError for a listener that was never added.
        """
        with self._lock:
            queue = self._queues[row.listener]
            places = min(most, row.concurrency - len(queue.held))
            return queue.take(max(0, min(places, queue.leases_left(row.per_minute, time.time()))))

    def take_suspect(self, row: ListenerRow) -> str | None:
        """Remove the oldest message that was leased before from the queue of a listener, and return its id.

        Such a message may have crashed a pump, so it is leased alone. Returns None if no such message waits, or
        if the listener's concurrency or rate allows no lease now. Raises KeyError for a listener that was never
        added.
        """
        with self._lock:
            queue = self._queues[row.listener]
            may = len(queue.held) < row.concurrency and queue.leases_left(row.per_minute, time.time()) > 0
            return queue.take_suspect() if may else None

    def take_all(self, name: str, most: int) -> list[str]:
        """Remove up to `most` messages from a removed listener's queue, and return their ids.

        They include messages that were leased before. The listener's concurrency and rate do not matter. The
        caller leases the messages to a pump, which returns them to their senders. The list is empty if no
        message waits or the listener is unknown.
        """
        with self._lock:
            queue = self._queues.get(name, _EMPTY)
            taken = queue.take(most)
            while len(taken) < most and (suspect := queue.take_suspect()) is not None:
                taken.append(suspect)
            return taken

    def give_back(self, name: str, read: Callable[[], Sequence[MessageRow]]) -> None:
        """Put messages back into a listener's queue that were taken out of it and not leased.

        An unknown listener is ignored.

        Args:
            name: The name of the listener.
            read: Returns the present rows of the messages. It is called while the queues are locked, so that no
                row changes between reading and queueing.
        """
        with self._lock:
            queue = self._queues.get(name)
            if queue is not None:
                for row in read():
                    queue.add(row)
        self.wake()

    async def wait_change(self, seen: int, timeout_s: float) -> None:
        """Wait until a listener or a message has changed, or `timeout_s` seconds have passed.

        `seen` is the value of `changes` that the caller read before. If `changes` differs now, this method
        returns at once. To tell a change from the timeout, the caller compares `changes` with `seen` again.
        """
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
        """The number of changes of listeners and messages since the start, for `wait_change`."""
        return self._changes

    def wake(self) -> None:
        """Increase `changes` and wake all coroutines in `wait_change`. May be called on any thread."""
        with self._lock:
            self._changes += 1
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(_resolve, future)

    def _add_listener(self, row: ListenerRow) -> None:
        with self._lock:
            known = self._rows.get(row.listener)
            # A row that `changed` brought before `load` is newer.
            if known is not None and (known.removed_at or known.added_at) > (row.removed_at or row.added_at):
                return
            self._rows[row.listener] = row
            if row.listener not in self._queues:
                queue = self._queues[row.listener] = Queue()
                for message in sorted(self._rows_of(row.listener), key=lambda one: one.handed_at or 0):
                    queue.add(message)
        self.wake()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
