"""The received messages of one MQTT connection that are not acknowledged yet.

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
    """A received message that is not acknowledged yet.

    Attributes:
        mid: the MQTT packet id.
        qos: the message's QoS.
        is_done: whether the message was passed to `confirm`. It is acknowledged when all earlier ones are, too.
    """

    mid: int
    qos: int
    is_done: bool = False


class AckWindow:
    """The unacknowledged messages of one MQTT connection, in order of arrival. Thread-safe.

    Pass each message to `add` when it arrives, and to `confirm` when it was handled. The window then calls
    `send_ack(packet id, QoS)`, which must send the acknowledgement to the broker.
    """

    def __init__(self, send_ack: Callable[[int, int], object]) -> None:
        self._send_ack = send_ack
        self._waiting: deque[PendingAck] = deque()
        self._lock = threading.Condition()
        self._closed = False

    def wait_room(self, limit: int, given_up: Callable[[], bool]) -> bool:
        """Wait, without a time limit, until fewer than `limit` messages are unacknowledged.

        The receive maximum asks the same of the broker. Mosquitto 2.0.11 does not respect it while it sends a
        queue (measured: 4,935 unacknowledged messages with a receive maximum of 200).

        Returns:
            True when there is room. False when the window was closed, or when `given_up()` returned True.
            `given_up` is called every 0.25 s.
        """
        with self._lock:
            while len(self._waiting) >= limit and not self._closed and not given_up():
                self._lock.wait(_ROOM_TICK_S)
            return not self._closed and not given_up()

    def add(self, mid: int, qos: int) -> PendingAck:
        """Append a received message to the window, and return the entry to pass to `confirm` later.

        Does not block. `mid` is the message's MQTT packet id.
        """
        pending = PendingAck(mid, qos)
        with self._lock:
            self._waiting.append(pending)
        return pending

    def confirm(self, pending: PendingAck) -> int:
        """Mark a message as handled, and send the acknowledgements that are now possible.

        A message is acknowledged when it and all earlier messages were confirmed. `pending` is the entry that
        `add` returned.

        Returns:
            The number of acknowledgements sent. 0 means that an earlier message is not confirmed yet or that
            the window is closed. More than 1 means that later messages waited for this one.
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
        """Stop sending acknowledgements. A waiting `wait_room` returns False."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def __len__(self) -> int:
        return len(self._waiting)
