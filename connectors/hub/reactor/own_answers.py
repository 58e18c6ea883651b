"""The answers that the gateway of this process posts itself, so that its reactor need not post them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from connectors.log.publisher import Append

# The reactor of another gateway may read the acknowledgement, so that no one here asks for it.
_KEPT: Final = 5000


class OwnAnswers:
    """The acknowledgements that this gateway appends, each with the appends of its answers. Thread-safe.

    The gateway calls `begin` before it appends an acknowledgement, and `end` when it has appended the answers.
    The reactor calls `wait` when it reads the acknowledgement. Without an entry, or if the gateway has failed
    to append the answers, the reactor posts them. Only the newest 5,000 acknowledgements are known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_ack: OrderedDict[str, Future[Sequence[Append] | None]] = OrderedDict()

    def begin(self, ack_id: str) -> None:
        """Note that this gateway appends the acknowledgement with the id `ack_id`, and then its answers."""
        with self._lock:
            self._by_ack[ack_id] = Future()
            if len(self._by_ack) > _KEPT:
                self._by_ack.popitem(last=False)

    def end(self, ack_id: str, appends: Sequence[Append] | None) -> None:
        """Report the appends of the answers; None if they are left to the reactor. Ends a wait of the reactor.

        Kafka need not have acknowledged the appends. An unknown `ack_id` is ignored.
        """
        with self._lock:
            found = self._by_ack.get(ack_id)
        if found is not None and not found.done():
            found.set_result(appends)

    def wait(self, ack_id: str, timeout_s: float) -> Sequence[Append] | None:
        """Return the appends of the answers to an acknowledgement, once: a later call returns None.

        Blocks until the gateway has appended them, at most `timeout_s` seconds. None means that the reactor
        has to post the answers.
        """
        with self._lock:
            found = self._by_ack.get(ack_id)
        appends = None
        if found is not None:
            with suppress(TimeoutError):
                appends = found.result(timeout_s)
            with self._lock:
                self._by_ack.pop(ack_id, None)
        return appends
