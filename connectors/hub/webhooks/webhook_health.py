"""The health of webhooks in the memory of one gateway: the newest calls, and how many have failed in a row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from connectors.hub.webhooks.webhook_client import CallResult


@dataclass(frozen=True)
class Health:
    """The calls of one webhook by this gateway. Times are microseconds since 1970 UTC, and None for never.

    Attributes:
        succeeded: The number of calls that succeeded.
        failed: The number of calls that failed.
        failures_in_a_row: The number of failed calls since the newest that succeeded.
        last_failure: Why the newest failed call has failed; "" if none has.
    """

    succeeded: int = 0
    failed: int = 0
    failures_in_a_row: int = 0
    last_success_at: int | None = None
    last_failure_at: int | None = None
    last_failure: str = ""


class WebhookHealth:
    """The health of all webhooks that this gateway has called since its start. Thread-safe."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Health] = {}
        self._now_s = now_s

    def of(self, webhook: str) -> Health:
        """Return the health of a webhook. It is that of no call if this gateway has made none."""
        with self._lock:
            return self._known.get(webhook, Health())

    def note(self, webhook: str, result: CallResult) -> None:
        """Count a call."""
        now_us = int(self._now_s() * 1e6)
        with self._lock:
            known = self._known.get(webhook, Health())
            if result.is_ok:
                found = replace(
                    known, succeeded=known.succeeded + 1, failures_in_a_row=0, last_success_at=now_us
                )
            else:
                found = replace(
                    known,
                    failed=known.failed + 1,
                    failures_in_a_row=known.failures_in_a_row + 1,
                    last_failure_at=now_us,
                    last_failure=result.why,
                )
            self._known[webhook] = found

    def forget(self, webhook: str) -> None:
        """Forget the calls of a webhook that was removed."""
        with self._lock:
            self._known.pop(webhook, None)
