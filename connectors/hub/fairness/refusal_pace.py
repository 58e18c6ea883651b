"""The pace at which a principal gets the refusals of requests that exceed a limit (429).

A client that ignores `Retry-After` sends its next request as soon as it has the answer. If the answer is held
for about the time for which the client was to wait, such a client costs little, whatever its speed.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException

# A principal gets so many refusals at once, and then so many in a second.
BURST: Final = 20
PER_SECOND: Final = 20.0
HELD_MOST_S: Final = 5.0
_MOST: Final = 10_000


class RefusalPace:
    """Holds the answers of a principal's requests that exceed a limit. Not thread-safe: for one event loop.

    Each principal gets `BURST` of them at once, and then `PER_SECOND` in a second. None is held longer than
    `HELD_MOST_S`. The number of held answers is bounded by the connections of the principal. Other answers are
    not held.

    Args:
        clock: Returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The time of each principal's last answer, which may be in the future. The newest principals are last.
        self._last_at: OrderedDict[str, float] = OrderedDict()

    def held_s(self, principal: str) -> float:
        """Return for how many seconds the next refusal of a principal is to be held. It counts as one."""
        now = self._clock()
        earliest = now - BURST / PER_SECOND
        at = max(self._last_at.pop(principal, earliest), earliest) + 1 / PER_SECOND
        self._last_at[principal] = at = min(at, now + HELD_MOST_S)
        if len(self._last_at) > _MOST:
            self._last_at.popitem(last=False)
        return max(0.0, at - now)

    async def hold(self, principal: str, error: Exception) -> None:
        """Wait before the answer to a refused request, if `error` is an HTTPException with the status 429."""
        if isinstance(error, HTTPException) and error.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            held_s = self.held_s(principal)
            if held_s:
                await asyncio.sleep(held_s)
