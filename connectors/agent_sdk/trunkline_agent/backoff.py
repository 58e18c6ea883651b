"""The back-off of the library and the product: pauses between attempts that double, at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.2
MOST_S: Final = 3.0
_DOUBLINGS_MOST: Final = 30


def backoff_s(
    failures: int, first_s: float = FIRST_S, most_s: float = MOST_S, chance: Callable[[], float] = random.random
) -> float:
    """Return how long to wait before another attempt: half to all of a time, so that callers spread.

    Args:
        failures: How many attempts have failed before the last one. The time doubles with each.
        first_s: The time after the first failure, in seconds.
        most_s: The longest time.
        chance: Returns a random number of at least 0 and less than 1.
    """
    return min(first_s * 2.0 ** min(failures, _DOUBLINGS_MOST), most_s) * (0.5 + chance() / 2)
