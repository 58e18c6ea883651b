"""Tokens a minute for a language model's listener (XP-08): how many more of its messages may begin.

Each pump process counts for itself and keeps to its share of the limit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MINUTE_S = 60.0


class TokenRate:
    """The tokens of the last minute against a limit. Before the first answer one message at a time may begin:
    nobody knows yet what one costs.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._spent: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._last_cost: float | None = None

    def spend(self, tokens: int) -> None:
        """An answer has cost so much."""
        tokens = max(0, tokens)
        self._spent.append((self._clock(), tokens))
        self._sum += tokens
        # What the next will cost: between what it was before and what it was now.
        self._last_cost = tokens if self._last_cost is None else (self._last_cost + tokens) / 2

    def places(self, under_way: int, most: int) -> int:
        """How many more may begin, at most `most`, when `under_way` have begun and not ended."""
        self._forget()
        left = self.per_minute - self._sum
        if left <= 0:
            return 0
        if self._last_cost is None:
            return max(0, min(most, 1 - under_way))
        # One is always let through while anything is left: else one that costs more than the limit never ran.
        fitting = max(1, int(left / max(1.0, self._last_cost)))
        return max(0, min(most, fitting - under_way))

    def _forget(self) -> None:
        begin = self._clock() - _MINUTE_S
        while self._spent and self._spent[0][0] <= begin:
            self._sum -= self._spent.popleft()[1]
