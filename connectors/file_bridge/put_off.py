"""What has to wait because something of its own is in the way, while all others go on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable
from typing import Final, Generic, TypeVar

_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0)

Key = TypeVar("Key", bound=Hashable)


class PutOff(Generic[Key]):
    """Who waits, and until when. `tell` is called with the key and the reason, once for each reason."""

    def __init__(self, tell: Callable[[Key, str], object]) -> None:
        self._tell = tell
        self._until: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._told: dict[Key, str] = {}

    def waits(self, key: Key) -> bool:
        """Whether it is not its turn yet."""
        return time.monotonic() < self._until.get(key, -math.inf)

    def failed(self, key: Key, error: Exception) -> None:
        """Let it wait for a while, longer each time."""
        why, failures = str(error), self._failures.get(key, 0)
        self._until[key] = time.monotonic() + _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
        self._failures[key] = failures + 1
        if self._told.get(key) != why:
            self._told[key] = why
            self._tell(key, why)

    def went_well(self, key: Key) -> None:
        """It waits no more, and what is in its way the next time is told."""
        for known in (self._until, self._failures, self._told):
            known.pop(key, None)

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all others: they are gone."""
        for key in self._failures.keys() - set(keys):
            self.went_well(key)
