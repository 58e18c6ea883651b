"""Records the gateway's own refusals (400, 401, 403, 413) in the log under `refused/http`, with a rate limit.

Each principal has a token bucket for each route and reason, so that no client can fill the ledger. The next
recorded refusal carries the number of those that were left out.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from connectors.gateway.web.answers import ApiError
from schemas.wire.record import OutgoingRecord
from schemas.wire.refusal import ANONYMOUS, Refusal, RefusalReason, refusal_record
from schemas.wire.verdicts import POLICY

log = structlog.stdlib.get_logger(__name__)

DOOR: Final = "http"
BURST: Final = 5.0
PER_SECOND: Final = 0.1
_BUCKETS: Final = 10_000


@dataclass
class _Bucket:
    tokens: float
    filled_at: float
    suppressed: int = 0


class RefusalRecorder:
    """A rate-limited recorder of refusals. `append` takes the records and must not block."""

    def __init__(
        self,
        append: Callable[[OutgoingRecord], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        door: str = DOOR,
    ) -> None:
        self._append = append
        self._door = door
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str, str], _Bucket] = OrderedDict()

    def record(self, reason: RefusalReason, why: str, principal: str | None, route: str) -> None:
        """Record one refusal, or count it. `route` is the template of the route, not the path that was sent."""
        name = principal or ANONYMOUS
        bucket = self._bucket((name, route, reason))
        if bucket.tokens < 1.0:
            bucket.suppressed += 1
            return
        bucket.tokens -= 1.0
        refusal = Refusal(
            request_id=str(uuid.uuid4()),
            reason=reason,
            why=why,
            principal=name,
            route=route[:200],
            suppressed=bucket.suppressed,
        )
        bucket.suppressed = 0
        log.info("refused", reason=reason, why=why, principal=name, route=route, suppressed=refusal.suppressed)
        self._append(refusal_record(refusal, self._door))

    def forbidden(self, why: str, principal: str, route: str) -> ApiError:
        """Record a refusal by policy and return the 403 error to raise."""
        self.record(POLICY, why, principal, route)
        return ApiError(403, POLICY, why)

    def _bucket(self, key: tuple[str, str, str]) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(BURST, now)
            if len(self._buckets) > _BUCKETS:
                # Remove the bucket that was used longest ago: it is full again, so only its count is lost.
                self._buckets.popitem(last=False)
        else:
            bucket.tokens = min(BURST, bucket.tokens + (now - bucket.filled_at) * PER_SECOND)
            bucket.filled_at = now
            self._buckets.move_to_end(key)
        return bucket
