"""The sync client of the hub: runs plans over a pool of kept connections. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Self, TypeVar

from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.hub.answer_errors import RefusalOf, error_of
from trunkline_agent.hub.http_exchange import EventParser, ProtocolFault, RequestHead, ServerEvent
from trunkline_agent.hub.hub_address import (
    ANSWER_TIMEOUT_S,
    BUSY_MOST,
    CONNECT_TIMEOUT_S,
    IDLE_MOST,
    SILENCE_S,
    HubAddress,
)
from trunkline_agent.hub.plans import Answer, Lost, Pause, Plan, Request
from trunkline_agent.hub.sync_connection import SyncConnection

if TYPE_CHECKING:
    import os

_T = TypeVar("_T")


class HubClient:
    """A client of one hub, for any number of threads. Use it as a context manager, or call `close`.

    The constructor makes no request. A proxy is used as the variables of the environment say: see `proxy_of`.

    Args:
        access: The address and the token.
        ca_certs: A file with the certificate authority that the hub's TLS must have. None: the authorities that
            this machine trusts.
        connect_timeout_s: How long to wait for a connection, its TLS handshake included.
        answer_timeout_s: How long to wait for a whole answer, beside the `wait_s` of its request.

    Raises:
        UsageError: The address or the token is not valid, or the file cannot be read.
    """

    def __init__(
        self,
        access: HubAccess,
        ca_certs: str | os.PathLike[str] | None = None,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.address = HubAddress.of(access.url)
        self._head = RequestHead(self.address, access.token)
        self._trust = self.address.trust(None if ca_certs is None else str(ca_certs))
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._lock = threading.Lock()
        self._idle: list[SyncConnection] = []
        self._busy: set[SyncConnection] = set()
        self._places = threading.BoundedSemaphore(BUSY_MOST)
        self._closed = threading.Event()

    def run(self, plan: Plan[_T]) -> _T:
        """Run a plan to its end and return its result. Raises the errors of the plan.

        Ctrl-C ends a wait at once, and so does `close` in another thread.
        """
        result: Any = None
        try:
            while True:
                step = plan.send(result)
                if isinstance(step, Request):
                    result = self._request(step)
                else:
                    self._pause(step)
                    result = None
        except StopIteration as end:
            found: _T = end.value
            return found
        finally:
            plan.close()

    def parts(
        self, request: Request, silence_s: float = SILENCE_S, refusal_of: RefusalOf = error_of
    ) -> Generator[bytes, None, None]:
        """Send a request once, and yield the parts of its answer's body as they come, to its end.

        The first part is empty: the answer has begun. Close the iterator to end the stream earlier. The request
        has a connection of its own.

        Args:
            request: The request.
            silence_s: How long to wait for the next bytes.
            refusal_of: Returns the error of an answer without success: its status, headers and body.

        Raises:
            BackboneUnreachable: No connection, it was lost, or it was silent for too long.
            TrunklineError: The error of the answer's status, as `refusal_of` returns it.
        """
        connection = self._opened(SyncConnection(self.address, self._head, self._trust))
        try:
            connection.open(self._connect_timeout_s)
            connection.send(request, self._answer_timeout_s)
            is_complete = connection.receive(time.monotonic() + self._answer_timeout_s + request.wait_s)
            http = connection.http
            while http.status is None or (http.status >= 300 and not is_complete):
                is_complete = connection.receive(time.monotonic() + silence_s)
            if http.status >= 300:
                answer = http.answer()
                raise refusal_of(answer.status, answer.headers, answer.body)
            yield b""
            while True:
                if found := http.take_parts():
                    yield found
                if is_complete:
                    return
                is_complete = connection.receive(time.monotonic() + silence_s)
        except (OSError, ProtocolFault) as error:
            raise self._lost(error) from error
        finally:
            self._ended(connection, is_reusable=False)

    def events(self, request: Request, silence_s: float = SILENCE_S) -> Iterator[ServerEvent]:
        """Send a request once, and yield the server-sent events of its answer as they come.

        It ends when the hub ends the stream. To go on, send a request with the header `Last-Event-ID`. See
        `parts` for the arguments and errors.
        """
        parser = EventParser()
        for part in self.parts(request, silence_s):
            yield from parser.feed(part)

    def close(self) -> None:
        """Close all connections. A plan that runs in another thread ends with TrunklineError."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.interrupt()
        for connection in idle:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pause(self, step: Pause) -> None:
        if self._closed.wait(max(0.0, step.seconds)):
            raise self._is_closed()

    def _request(self, request: Request) -> Answer | Lost:
        if request.wait_s:
            return self._attempt(request)
        with self._places:
            return self._attempt(request)

    def _attempt(self, request: Request) -> Answer | Lost:
        """Send a request once, or again at once if it met a kept connection that had ended."""
        until = time.monotonic() + self._connect_timeout_s + self._answer_timeout_s + request.wait_s
        while True:
            connection, is_kept, was_sent, is_reusable = self._any_connection(), True, False, False
            try:
                if not connection.is_open:
                    is_kept = False
                    connection.open(self._connect_timeout_s)
                was_sent = True
                answer = connection.answer(request, until)
                is_reusable = connection.http.reuse()
                return answer
            except (OSError, ProtocolFault) as error:
                if self._closed.is_set():
                    raise self._is_closed() from None
                has_ended = is_kept and connection.http.is_untouched and not isinstance(error, TimeoutError)
                if not (has_ended and request.is_repeatable):
                    return Lost(self.address.explained(error), was_sent, str(error))
            finally:
                self._ended(connection, is_reusable)

    def _any_connection(self) -> SyncConnection:
        """Return a kept connection that is alive, else a new one that is not open yet."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._opened(SyncConnection(self.address, self._head, self._trust))
            if connection.is_alive():
                return self._opened(connection)
            connection.close()

    def _opened(self, connection: SyncConnection) -> SyncConnection:
        with self._lock:
            if self._closed.is_set():
                connection.close()
                raise self._is_closed()
            self._busy.add(connection)
        return connection

    def _ended(self, connection: SyncConnection, is_reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if is_reusable and len(self._idle) < IDLE_MOST and not self._closed.is_set():
                self._idle.append(connection)
                return
        connection.close()

    def _lost(self, error: Exception) -> TrunklineError:
        if self._closed.is_set():
            return self._is_closed()
        return BackboneUnreachable(self.address.explained(error))

    def _is_closed(self) -> TrunklineError:
        return TrunklineError(f"the client of {self.address.url} is closed", reason="closed")
