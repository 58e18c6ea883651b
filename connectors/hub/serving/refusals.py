"""Appends records of the gateway's refusals (400, 401, 403, 413, 429) to the log, with a rate limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from connectors.hub.serving.answers import ApiError
from connectors.plumbing.network.rates import FewRefusals
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.verdicts import POLICY

DOOR: Final = "http"


class RefusalRecorder(FewRefusals):
    """A rate-limited recorder of refused requests. For the arguments see `FewRefusals`. Not thread-safe."""

    def __init__(
        self,
        append: Callable[[OutgoingRecord], object],
        clock: Callable[[], float] = time.monotonic,
        *,
        door: str = DOOR,
    ) -> None:
        super().__init__(append, clock, door=door)

    def forbidden(self, why: str, principal: str, route: str) -> ApiError:
        """Record a refusal with the reason `policy`, and return an ApiError (403) for the caller to raise.

        The arguments are those of `record`.
        """
        self.record(POLICY, why, principal, route)
        return ApiError(403, POLICY, why)
