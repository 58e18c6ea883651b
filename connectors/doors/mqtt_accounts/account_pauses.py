"""The pauses of accounts at the broker: which owners may publish nothing now, and until when (LM-10)."""

from __future__ import annotations

import time
from collections.abc import Callable


class AccountPauses:
    """The pauses of the owners of accounts. Not thread-safe.

    Attributes:
        applied: the owners that were paused at the last call of `turn`.

    Args:
        clock: returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}
        self.applied: frozenset[str] = frozenset()

    def pause(self, owner: str, seconds: float) -> None:
        """Pause an owner for so many seconds from now. A shorter pause does not end a longer one."""
        self._ends[owner] = max(self._ends.get(owner, 0.0), self._clock() + seconds)

    @property
    def has_new(self) -> bool:
        """True if a pause has begun since the last call of `turn`."""
        return not self._ends.keys() <= self.applied

    def next_end(self, default: float) -> float:
        """Return the time of the clock at which the first pause ends, or `default` if that is earlier."""
        return min(default, *self._ends.values()) if self._ends else default

    def turn(self) -> tuple[list[str], list[str]]:
        """Bring `applied` up to date. Return the owners whose pauses have begun, and those whose have ended."""
        now = self._clock()
        self._ends = {owner: end for owner, end in self._ends.items() if end > now}
        before, self.applied = self.applied, frozenset(self._ends)
        return sorted(self.applied - before), sorted(before - self.applied)
