"""Back off per key, so that one failing key does not delay the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0)

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Failing:
    until: float = -math.inf
    failures: int = 0
    why: str | None = None


class PutOff(Generic[Key]):
    """The keys that have to wait. `report` is called with the key and the reason, once for each reason."""

    def __init__(self, report: Callable[[Key, str], object]) -> None:
        self._report = report
        self._failing: dict[Key, _Failing] = {}

    def waits(self, key: Key) -> bool:
        """Return whether the key still has to wait."""
        return key in self._failing and time.monotonic() < self._failing[key].until

    def failed(self, key: Key, error: Exception) -> None:
        """Let the key wait, longer after each failure."""
        found = self._failing.setdefault(key, _Failing())
        found.until = time.monotonic() + _BACKOFF_S[min(found.failures, len(_BACKOFF_S) - 1)]
        found.failures += 1
        why = str(error)
        if found.why != why:
            found.why = why
            self._report(key, why)

    def went_well(self, key: Key) -> None:
        """Let the key wait no more, and report its next failure again."""
        self._failing.pop(key, None)

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all other keys."""
        for key in self._failing.keys() - set(keys):
            del self._failing[key]
