"""The stream of a job's events on a thread of its own, so that its reader can stop waiting."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from typing import Final, Self

from trunkline_agent.hub.http_exchange import ServerEvent
from trunkline_agent.hub.sync_client import HubClient
from trunkline_agent.jobs.delegator_plans import JobWatch

_WAITING: Final = 1000
_TICK_S: Final = 0.25
# A wait without a limit of its own is divided, because a wait without a bound cannot be interrupted everywhere.
_LONGEST_WAIT_S: Final = 60.0
_END_S: Final = 5.0
pause = time.sleep


class StreamThread:
    """The stream of a watch, open while its `with` block runs. The client is closed with it."""

    def __init__(self, client: HubClient, watch: JobWatch) -> None:
        self._client, self._watch = client, watch
        self._found: queue.Queue[ServerEvent | Exception | None] = queue.Queue(_WAITING)
        self._closed = threading.Event()

    def next(self) -> ServerEvent | Exception | None:
        """Wait for the next event, the error that lost the stream, or None for its end. Raises WatchTimeout."""
        while True:
            with suppress(queue.Empty):
                return self._found.get(timeout=max(0.0, min(self._watch.left_s(), _LONGEST_WAIT_S)))

    def __enter__(self) -> Self:
        self._reader = threading.Thread(target=self._read, name="job-watch", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._client.close()
        self._reader.join(_END_S)

    def _read(self) -> None:
        try:
            for event in self._client.events(self._watch.request()):
                self._put(event)
            self._put(None)
        except Exception as error:  # noqa: BLE001  raised to the reader
            self._put(error)

    def _put(self, one: ServerEvent | Exception | None) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._found.put(one, timeout=_TICK_S)
                return
