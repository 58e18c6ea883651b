"""The leased messages that an agent holds, when to extend their leases, and when to give them up.

Does no input or output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from trunkline_agent.errors import UsageError

ACKNOWLEDGED: Final = "acknowledged"
GIVEN_BACK: Final = "given back"


@dataclass(eq=False, slots=True)
class Held:
    """A leased message.

    Attributes:
        message_id: Its id.
        lease_id: The id of its lease.
        lease_s: The duration of the lease, in seconds.
        longest_s: How long its handling may take. None: without an end.
        is_lost: Whether the hub has said that the lease is another's now, or the handling took too long.
        is_overdue: Whether the handling took longer than `longest_s`, and the message is given back.
        settled: `ACKNOWLEDGED` or `GIVEN_BACK`, since that was asked of the hub. None: neither, or the agent's
            `ack` or `nack` failed.
        on_overdue: Called when the handling has taken too long. None: nobody is told.
    """

    message_id: str
    lease_id: str
    lease_s: int
    longest_s: float | None = None
    is_lost: bool = False
    is_overdue: bool = False
    settled: str | None = None
    on_overdue: Callable[[], object] | None = None

    @property
    def why_overdue(self) -> str:
        """The reason for which it is given back."""
        return f"it was handled for longer than {self.longest_s:g} s"


class Extension(NamedTuple):
    """One request that extends leases."""

    lease_id: str
    lease_s: int
    message_ids: list[str]


class HeldMessages:
    """The messages that an agent holds. Thread-safe.

    A lease is extended when a third of it has passed, so that two attempts may fail. Messages that were leased
    together are extended for at most their longest time of handling since the last one of them was begun.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._due_at: dict[str, float] = {}
        self._ends_at: dict[str, float] = {}

    def add(
        self,
        message_ids: Iterable[str],
        lease_id: str,
        lease_s: int,
        now: float,
        longest_s: float | None = None,
    ) -> list[Held]:
        """Note messages that were leased together, at a moment of the monotonic clock."""
        found = [Held(one, lease_id, lease_s, longest_s) for one in message_ids]
        with self._lock:
            for one in found:
                self._held[one.message_id] = one
            self._due_at[lease_id] = now + lease_s / 3
            if longest_s is not None:
                self._ends_at[lease_id] = now + longest_s
        return found

    def begin(self, held: Held, now: float) -> None:
        """Note that the handling of a message begins. The messages behind it have their time from now."""
        if held.longest_s is not None:
            with self._lock:
                self._ends_at[held.lease_id] = now + held.longest_s

    def settle(self, held: Held, how: str) -> bool:
        """Forget a message that is acknowledged or given back now. Return False if that was done before.

        Raises:
            UsageError: The other was done before.
        """
        with self._lock:
            if held.settled not in (None, how):
                raise UsageError(f"message {held.message_id} is {held.settled} already")
            is_first = held.settled is None
            held.settled = how
            if self._held.get(held.message_id) is held:
                del self._held[held.message_id]
            return is_first

    def lose(self, lease_id: str, message_ids: Iterable[str]) -> None:
        """Note that the hub did not extend the lease of these messages, because it is another's now."""
        with self._lock:
            for message_id in message_ids:
                held = self._held.get(message_id)
                if held is not None and held.lease_id == lease_id:
                    held.is_lost = True
                    del self._held[message_id]

    def rest(self) -> list[Held]:
        """Return all messages that are held now."""
        with self._lock:
            return list(self._held.values())

    def next_due(self) -> float | None:
        """Return the moment of the next extension or end of a handling, None if no message is held."""
        with self._lock:
            self._forget_ended()
            return min((*self._due_at.values(), *self._ends_at.values()), default=None)

    def overdue(self, now: float) -> list[Held]:
        """Forget and return the messages whose handling has taken too long, for the caller to give back."""
        with self._lock:
            ended = {lease_id for lease_id, ends_at in self._ends_at.items() if ends_at <= now}
            found = [held for held in self._held.values() if held.lease_id in ended]
            for held in found:
                held.is_lost = held.is_overdue = True
                del self._held[held.message_id]
            for lease_id in ended:
                del self._ends_at[lease_id]
        for held in found:
            if held.on_overdue is not None:
                held.on_overdue()
        return found

    def due(self, now: float) -> list[Extension]:
        """Return the extensions that are due, and set the time of the next one of each."""
        with self._lock:
            self._forget_ended()
            found: dict[str, Extension] = {}
            for held in self._held.values():
                if self._due_at[held.lease_id] <= now:
                    asked = found.setdefault(held.lease_id, Extension(held.lease_id, held.lease_s, []))
                    asked.message_ids.append(held.message_id)
            for asked in found.values():
                self._due_at[asked.lease_id] = now + asked.lease_s / 3
            return list(found.values())

    def _forget_ended(self) -> None:
        live = {held.lease_id for held in self._held.values()}
        for times in (self._due_at, self._ends_at):
            for lease_id in times.keys() - live:
                del times[lease_id]
