"""The messages of one MQTT connection that are not acknowledged yet.

Acknowledgements go out in the order of the messages, as MQTT 5 demands (4.6.0-2).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_ROOM_TICK_S: Final = 0.25


@dataclass(eq=False)
class PendingAck:
    """A message that waits for its acknowledgement: packet id, QoS, and whether it may be acknowledged."""

    mid: int
    qos: int
    is_done: bool = False


class AckWindow:
    """The unacknowledged messages of one connection, in order of arrival. Thread-safe."""

    def __init__(self, send_ack: Callable[[int, int], object]) -> None:
        self._send_ack = send_ack
        self._waiting: deque[PendingAck] = deque()
        self._lock = threading.Condition()
        self._closed = False

    def wait_room(self, limit: int, given_up: Callable[[], bool]) -> bool:
        """Wait until fewer than `limit` messages are unacknowledged.

        The receive maximum asks the same of the broker, but Mosquitto 2.0.11 does not respect it while it sends
        a queue (measured: 4,935 unacknowledged messages with a receive maximum of 200).

        Returns:
            False when the window was closed or `given_up()` became true before.
        """
        with self._lock:
            while len(self._waiting) >= limit and not self._closed and not given_up():
                self._lock.wait(_ROOM_TICK_S)
            return not self._closed and not given_up()

    def add(self, mid: int, qos: int) -> PendingAck:
        """Enter a message. Pass the result to `confirm` later."""
        pending = PendingAck(mid, qos)
        with self._lock:
            self._waiting.append(pending)
        return pending

    def confirm(self, pending: PendingAck) -> int:
        """Acknowledge a message as soon as all earlier ones are confirmed.

        Returns:
            How many messages were acknowledged now: this one and those behind it that waited for it.
        """
        acked = 0
        with self._lock:
            pending.is_done = True
            while self._waiting and self._waiting[0].is_done and not self._closed:
                first = self._waiting.popleft()
                self._send_ack(first.mid, first.qos)
                acked += 1
            self._lock.notify_all()
        return acked

    def close(self) -> None:
        """Send no acknowledgement any more."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def __len__(self) -> int:
        return len(self._waiting)
