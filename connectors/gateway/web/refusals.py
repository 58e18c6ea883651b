"""What the gateway refuses by itself (400, 401, 403, 413) goes into the log under `refused/http`, rate-limited.

Each principal has a bucket for each route and reason, so that nobody fills the ledger; what a bucket holds
back is counted, and the next refusal that is recorded carries the number.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from schemas.wire.record import OutgoingRecord
from schemas.wire.refusal import ANONYMOUS, Refusal, RefusalReason, refusal_record

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
    """Decides which refusals are recorded, and hands them to `append`, which must not block."""

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
        """Record one refusal, or count it. `route` is the template of the route, nothing that was sent."""
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

    def _bucket(self, key: tuple[str, str, str]) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(BURST, now)
            if len(self._buckets) > _BUCKETS:
                # The one that was refused longest ago: its bucket is full again, only its count is lost.
                self._buckets.popitem(last=False)
        else:
            bucket.tokens = min(BURST, bucket.tokens + (now - bucket.filled_at) * PER_SECOND)
            bucket.filled_at = now
            self._buckets.move_to_end(key)
        return bucket
