"""Appends records of a door's refusals to the log, with a rate limit.

They belong to the stream `refused/<door>`. Each principal has a token bucket for each route and reason, so that
no client can fill the ledger. The next recorded refusal carries the number of those that were left out.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import structlog

from connectors.plumbing.network.token_buckets import TokenBuckets
from schemas.streams.refused.refusal import ANONYMOUS, Refusal, RefusalReason
from schemas.wire.record import OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

BURST: Final = 5.0
PER_SECOND: Final = 0.1
_BUCKETS: Final = 10_000


class FewRefusals:
    """A rate-limited recorder of refused requests. Not thread-safe.

    `append` appends a record to the log, and must not block. `clock` returns seconds and never goes back.
    `door` is the door of the requests.
    """

    def __init__(
        self,
        append: Callable[[OutgoingRecord], object],
        clock: Callable[[], float] = time.monotonic,
        *,
        door: str,
    ) -> None:
        self._append = append
        self._door = door
        self._buckets: TokenBuckets[tuple[str, str, str]] = TokenBuckets(BURST, PER_SECOND, clock, _BUCKETS)
        self._suppressed: OrderedDict[tuple[str, str, str], int] = OrderedDict()

    def record(self, reason: RefusalReason, why: str, principal: str | None, route: str) -> None:
        """Append a record of a refused request to the log, or only count it if there were too many.

        For each principal, route and reason, five records may follow at once, and then one every ten seconds.
        The next record that is appended carries the number of those that were only counted. The method does not
        block.

        Args:
            reason: The code of the refusal, such as `policy`.
            why: The explanation, which must quote no secret.
            principal: The sender of the request; None if it is unknown.
            route: Method and path template of the route, not the path that was sent.
        """
        name = principal or ANONYMOUS
        key = (name, route, reason)
        suppressed = self._suppressed.pop(key, 0)
        if self._buckets.take(key):
            self._suppressed[key] = suppressed + 1
            if len(self._suppressed) > _BUCKETS:
                self._suppressed.popitem(last=False)
            return
        refusal = Refusal(
            request_id=str(uuid.uuid4()),
            reason=reason,
            why=why,
            principal=name,
            route=route[:200],
            suppressed=suppressed,
        )
        log.info("refused", reason=reason, why=why, principal=name, route=route, suppressed=suppressed)
        self._append(refusal.record(door=self._door, principal=refusal.principal))
