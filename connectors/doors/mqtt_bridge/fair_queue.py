"""The messages that the bridge has received and not begun to handle, in turns by publisher (LM-09).

At the broker all publishers share one queue to the bridge. The bridge reads ahead in it, and a message of one
publisher then waits for one message of each other publisher, and not for all that came before it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Final, Generic, TypeVar

from connectors.plumbing.network.rates import RoundRobin

_T = TypeVar("_T")

# The bytes that may wait, and as many that may be under way. A message that exceeds them waits alone, so one of
# any size gets through.
BYTES_MOST: Final = 32 * 1024 * 1024


class FairQueue(Generic[_T]):
    """Messages in turns by publisher, and a bound on how many are handled at once. Thread-safe.

    The messages of one publisher keep their order. One thread calls `put`, one thread calls `take`, and
    any thread may call `done`.

    Args:
        under_way_most: The number of messages that may have been taken and not be done.
        of_each_most: The number of those that may be of one publisher.
        bytes_most: The bytes of the messages that may wait. No further message is taken while so many bytes are
            under way.
    """

    def __init__(self, under_way_most: int, of_each_most: int, bytes_most: int = BYTES_MOST) -> None:
        self._under_way_most = under_way_most
        self._of_each_most = of_each_most
        self._bytes_most = bytes_most
        self._changed = threading.Condition()
        self._waiting: RoundRobin[str, tuple[_T, int]] = RoundRobin()
        self._waiting_bytes = 0
        self._under_way: Counter[str] = Counter()
        # The sizes of those, by publisher in the order of their turns, and their sum.
        self._sizes: dict[str, deque[int]] = {}
        self._under_way_bytes = 0
        self._closed = False

    def put(self, publisher: str, message: _T, size: int) -> None:
        """Add a message of `size` bytes. Wait, without a time limit, while too many bytes wait.

        The message is dropped if the queue is closed, also while the call waits.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or not self._waiting_bytes or self._waiting_bytes + size <= self._bytes_most
                )
            )
            if self._closed:
                return
            self._waiting.push(publisher, (message, size))
            self._waiting_bytes += size
            self._changed.notify_all()

    def take(self) -> list[_T]:
        """Wait until messages may be handled, and return them in the order of their turns.

        They count as under way until `done` is called for each. Returns an empty list when the queue is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and self._has_place()))
            found: list[_T] = []
            while self._waiting and self._has_place() and not self._closed:
                publisher, (message, size) = self._waiting.pop()
                self._waiting_bytes -= size
                self._under_way[publisher] += 1
                self._sizes.setdefault(publisher, deque()).append(size)
                self._under_way_bytes += size
                if self._under_way[publisher] >= self._of_each_most:
                    self._waiting.hold(publisher)
                found.append(message)
            self._changed.notify_all()
            return found

    def done(self, publisher: str) -> None:
        """Note that a message of this publisher that was taken has been handled. Another one may then begin."""
        with self._changed:
            self._under_way[publisher] -= 1
            # Messages of one publisher are done in nearly their order, and all of them are.
            self._under_way_bytes -= self._sizes[publisher].popleft()
            if not self._under_way[publisher]:
                del self._under_way[publisher], self._sizes[publisher]
            self._waiting.release(publisher)
            self._changed.notify_all()

    def _has_place(self) -> bool:
        return self._under_way.total() < self._under_way_most and self._under_way_bytes < self._bytes_most

    def close(self) -> None:
        """Drop all messages that wait, and end the waits of `put` and `take`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
