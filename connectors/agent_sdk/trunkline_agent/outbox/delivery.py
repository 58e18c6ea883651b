"""The contract between the outbox of a job and the ways to send its events, and how to end a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol

from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.outbox.outbox import PendingEvent
from trunkline_agent.wire.receipt import Receipt

INTERRUPTED: Final = "interrupted: the event is not confirmed and stays in the outbox"
Confirmed = Callable[[PendingEvent, Receipt], None]


class Interruption:
    """A request to end a delivery before its time. Thread-safe.

    A cancelled task sets it, and the thread that delivers for the task ends soon.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._actions: list[Callable[[], object]] = []

    def set(self) -> None:
        """Interrupt the delivery: end its pauses, and call what was passed to `also`."""
        self._event.set()
        with self._lock:
            actions, self._actions = self._actions, []
        for action in actions:
            action()

    def also(self, action: Callable[[], object]) -> None:
        """Call `action` when the delivery is interrupted, at once if it is already."""
        with self._lock:
            self._actions.append(action)
        if self._event.is_set():
            self.set()

    def forget(self, action: Callable[[], object]) -> None:
        """Do not call `action` any more."""
        with self._lock, suppress(ValueError):
            self._actions.remove(action)

    def pause(self, seconds: float) -> None:
        """Wait so many seconds. Raises BackboneUnreachable when the delivery is interrupted."""
        if self._event.wait(max(0.0, seconds)):
            raise BackboneUnreachable(INTERRUPTED)


class EventDelivery(Protocol):
    """A way to send the events of one job."""

    @property
    def longest_s(self) -> float:
        """The longest time in seconds that one event takes, for others that wait for the outbox."""
        ...

    def deliver(
        self,
        events: Iterable[PendingEvent],
        confirmed: Confirmed,
        *,
        wait_for_receipt: bool,
        interruption: Interruption,
    ) -> None:
        """Send the events in order, and return when all are confirmed.

        Args:
            events: The events, already numbered and signed.
            confirmed: Called with each event and its receipt before the next event is sent, whatever verdict
                the receipt has.
            wait_for_receipt: Whether to wait for Trunkline's receipt. Over MQTT the broker's acknowledgement is
                enough otherwise.
            interruption: Ends the delivery with BackboneUnreachable.
        """
        ...
