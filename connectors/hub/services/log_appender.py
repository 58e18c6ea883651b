"""Appends the records of the gateway's handlers to the log, and replaces a publisher that has failed.

**Delivers** each record at most once per call. After an error the record may or may not have been delivered.
**Acknowledges when** Kafka has the record and, for `settle`, the live view has settled it.
**Loses when** never silently: while Kafka is unreachable, every call fails at once with BackboneUnreachable.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar, cast

import structlog

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.log_clock import LogClock
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.serving.answers import ApiError, refuse_rejected
from connectors.log.publisher import Append, Publisher, RecordRefused
from schemas.log_access.event_topic import TopicMissingError, check_topic, reach_kafka
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.wire.verdicts import TOO_LARGE

log = structlog.stdlib.get_logger(__name__)
_T = TypeVar("_T")

_PROBE_S: Final = 1.0
_TOPIC_S: Final = 3.0
_CLOSE_S: Final = 5.0
_UNATTENDED_LIMIT: Final = 1000
# How long a record waits for others of its partition, so that they share a request (decision 0035).
_LINGER_MS: Final = 2


class LogAppender:
    """Appends records to the log, for coroutines of one event loop and for threads.

    Call `open` first and `close` at the end. A thread tests the connection to Kafka once a second, and replaces
    a publisher that has failed.
    """

    def __init__(self, settings: Settings, live_view: LiveView, log_clock: LogClock | None = None) -> None:
        self._settings = settings
        self._log_clock = LogClock() if log_clock is None else log_clock
        self._live_view = live_view
        self._timeout_s = settings.gateway.settle_timeout_s
        self._publisher: Publisher | None = None
        self._away: str | None = "not opened yet"
        self._topic_asked_at = 0.0
        self.is_topic_gone = False
        """True while Kafka answers that the topic does not exist; asked every few seconds."""
        # Append blocks when too many records wait to be sent, and the event loop must not block.
        self._hands = ThreadPoolExecutor(1, thread_name_prefix="gateway-append")
        self._under_way: dict[int, float] = {}  # the start of each call, by its number
        self._calls = 0
        # The calls of `settle_then`, by their numbers, with their starts. They have one timer, for the oldest.
        self._settling: dict[int, tuple[float, Callable[[SettledRecord | Exception], None]]] = {}
        self._overdue: asyncio.TimerHandle | None = None
        self._unattended = threading.BoundedSemaphore(_UNATTENDED_LIMIT)
        self._wake = threading.Event()
        self._closing = False
        self._watch = threading.Thread(target=self._watch_over, name="gateway-kafka-watch", daemon=True)

    def open(self) -> None:
        """Check the log's topic, create the publisher and start the thread that watches Kafka.

        Raises BackboneUnreachable if Kafka does not answer. Raises TrunklineError if the topic is missing or
        does not fit the settings.
        """
        check_topic(self._settings)
        self._publisher = self._new_publisher()
        self._away = None
        self._watch.start()

    def close(self) -> None:
        """Stop the thread, and wait up to 5 s for Kafka to acknowledge the records that were appended.

        Records without an acknowledgement by then may be lost.
        """
        self._closing = True
        self._wake.set()
        if self._watch.is_alive():
            self._watch.join(_CLOSE_S)
        self._hands.shutdown(wait=True, cancel_futures=True)
        if self._publisher is not None:
            self._publisher.close(_CLOSE_S)

    @property
    def away(self) -> str | None:
        """The reason why no record can be appended now, or None if records can be appended."""
        if self._away is None and self._under_way:
            # A copy, because the publisher's thread removes calls at the same time.
            oldest = next(iter(list(self._under_way.values())), None)
            if oldest is not None and time.monotonic() - oldest > self._timeout_s:
                return "Kafka does not answer"
        return self._away

    def check(self) -> Publisher:
        """Return the publisher. Raise BackboneUnreachable if Kafka is known to be away, or the view ended.

        A handler calls this method before it does other work for a request that appends a record, because
        `settle` would then fail at once. It does not ask Kafka, so it does not block.
        """
        publisher, away = self._publisher, self.away
        if self._live_view.failure is not None:
            away = "the live view has stopped"  # and gives no verdict
        if away is not None or publisher is None:
            raise BackboneUnreachable(f"nothing can be appended now: {away or 'the publisher has failed'}")
        return publisher

    async def settle(self, record: OutgoingRecord) -> SettledRecord:
        """Append a record, wait until the live view has settled it, and return it with its verdict.

        The verdict may be *rejected*; that raises no error.

        Raises:
            BackboneUnreachable: Kafka is unreachable (raised at once), or the record was not settled within
                `gateway.settle_timeout_s`. After such a timeout the log may or may not have the record.
            ApiError: 413 for a record that is too large for Kafka.
        """
        promise: asyncio.Future[SettledRecord] = asyncio.get_running_loop().create_future()

        def done(found: SettledRecord | Exception) -> None:
            if promise.done():
                return
            if isinstance(found, Exception):
                promise.set_exception(found)
            else:
                promise.set_result(found)

        self.settle_then(record, done)
        return await promise

    def settle_then(self, record: OutgoingRecord, done: Callable[[SettledRecord | Exception], None]) -> None:
        """Append a record, and call `done` on the event loop with the settled record, or an error of `settle`.

        For the event loop. It returns at once, and `done` may be called before it returns.
        """
        try:
            publisher = self.check()
        except BackboneUnreachable as error:
            done(error)
            return
        self._log_clock.sample(record.ce_id)
        self._calls += 1
        call, began, loop = self._calls, time.monotonic(), asyncio.get_running_loop()
        self._under_way[call] = began
        self._settling[call] = (began, done)
        if self._overdue is None:
            self._overdue = loop.call_later(self._timeout_s, self._end_overdue)

        def came_back(found: SettledRecord | Exception) -> None:
            self._under_way.pop(call, None)
            if _is_on(loop):
                self._end(call, found)
            else:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._end, call, found)

        if not publisher.send(record, came_back, may_block=False):
            self._hands.submit(publisher.send, record, came_back)

    def _end(self, call: int, found: SettledRecord | Exception) -> None:
        """Tell the caller of `settle_then`, unless that took too long and it was told so."""
        waiting = self._settling.pop(call, None)
        if waiting is None:
            return
        if isinstance(found, RecordRefused):
            found = ApiError(413, TOO_LARGE, "Kafka takes no record of this size")
        elif isinstance(found, BackboneUnreachable):
            self._wake.set()
        waiting[1](found)

    def _end_overdue(self) -> None:
        """Tell the callers of `settle_then` that have waited too long, and set the timer for the next one."""
        self._overdue, loop, now_s = None, asyncio.get_running_loop(), time.monotonic()
        for call, (began, _) in self._settling.items():
            left_s = began + self._timeout_s - now_s
            if left_s > 0:
                self._overdue = loop.call_later(left_s, self._end_overdue)
                break
            why = f"the record was not settled within {self._timeout_s:g} s"
            # Each by itself: an error of one who is told holds up no other.
            loop.call_soon(self._end, call, BackboneUnreachable(why))

    async def settle_accepted(self, record: OutgoingRecord) -> SettledRecord:
        """Append a record, wait until the live view has settled it, and return it unless it is rejected.

        The verdict of the returned record is *accepted* or *duplicate*.

        Raises:
            ApiError: The fold rejected the record (the status follows from the reason), or it is too large for
                Kafka (413).
            BackboneUnreachable: Kafka is unreachable (raised at once), or the record was not settled within
                `gateway.settle_timeout_s`. After such a timeout the log may or may not have the record.
        """
        return refuse_rejected(await self.settle(record))

    async def settle_all(self, records: Iterable[OutgoingRecord]) -> list[SettledRecord]:
        """Append several records at once, wait until all are settled, and return them with their verdicts.

        The results have the order of `records`; a verdict may be *rejected*. If some records fail, the first of
        the errors of `settle` is raised, but only when no record is under way any more. Others may then be
        settled.
        """
        return await gather_all(self.settle(record) for record in records)

    def settle_in_thread(self, record: OutgoingRecord) -> SettledRecord:
        """Append a record, block until the live view has settled it, and return it with its verdict.

        For threads; never call it in the event loop. The verdict may be *rejected*; that raises no error.

        Raises:
            BackboneUnreachable: Kafka is unreachable (raised at once), or the record was not settled in time.
                After such a timeout the log may or may not have the record.
            TimeoutError: Kafka did not acknowledge the record within `gateway.settle_timeout_s`.
            RecordRefused: The record is too large for Kafka.
        """
        publisher = self.check()
        try:
            append = self._hands.submit(publisher.append, record).result(self._timeout_s)
        except TimeoutError:
            raise BackboneUnreachable(f"Kafka took no record within {self._timeout_s:g} s") from None
        return self._live_view.wait_settled(append.result(self._timeout_s), self._timeout_s)

    def append_unattended(self, record: OutgoingRecord) -> None:
        """Append a record without waiting for its verdict. May be called on any thread; does not block.

        The record is dropped, with a line in the program's log, while Kafka is unreachable. It is also dropped
        while 1,000 earlier records of this method wait for Kafka. The caller does not learn the outcome.
        """
        publisher = self._publisher
        if self.away is not None or publisher is None or not self._unattended.acquire(blocking=False):
            log.warning("record_dropped", type=record.type, stream=record.stream)
            return

        def append() -> None:
            try:
                publisher.append(record).add_done_callback(lambda _: self._unattended.release())
            except BaseException:
                self._unattended.release()
                raise

        self._hands.submit(append)

    async def append(self, record: OutgoingRecord) -> Append:
        """Append a record, and return the future of its position, without waiting for Kafka's acknowledgement.

        Raises:
            BackboneUnreachable: Kafka is unreachable.
            TimeoutError: Too many records wait to be sent, and none was sent within `gateway.settle_timeout_s`.
        """
        publisher = self.check()
        self._log_clock.sample(record.ce_id)
        self._calls += 1
        call, self._under_way[self._calls] = self._calls, time.monotonic()
        append = Append()
        append.add_done_callback(lambda _: self._under_way.pop(call, None))
        try:
            if not publisher.send(record, append.came_back, may_block=False):
                sending = self._hands.submit(publisher.send, record, append.came_back)
                await asyncio.wait_for(asyncio.wrap_future(sending), self._timeout_s)
        except BaseException:
            self._under_way.pop(call, None)
            raise
        return append

    def _watch_over(self) -> None:
        while not self._closing:
            self._wake.wait(_PROBE_S)
            self._wake.clear()
            if self._closing:
                return
            try:
                reach_kafka(self._settings.kafka, _PROBE_S)
                self._look_for_topic()
                self._renew()
            except (TrunklineError, OSError) as error:
                self._say(str(error))
            except Exception as error:
                log.exception("kafka_watch_failed")
                self._say(type(error).__name__)
            else:
                self._say(None)

    def _look_for_topic(self) -> None:
        """Raise TopicMissingError while the topic is missing. Without writes nothing else would notice."""
        publisher, now = self._publisher, time.monotonic()
        if publisher is not None and now - self._topic_asked_at >= _TOPIC_S:
            self._topic_asked_at = now
            self.is_topic_gone = not publisher.has_topic(_PROBE_S)
        if self.is_topic_gone:
            raise TopicMissingError(f"Kafka has no topic {self._settings.kafka.topic!r}; it was deleted")

    def _renew(self) -> None:
        publisher = self._publisher
        if publisher is not None and not publisher.failed:
            return
        if publisher is not None:
            self._say("the publisher has failed")
            self._publisher = None
            publisher.close(_PROBE_S)
        self._publisher = self._new_publisher()

    def _new_publisher(self) -> Publisher:
        # The size of the request was checked, so the record around it is never cut.
        cut_beyond = self._settings.kafka.record_limit_bytes
        own = self._live_view.own
        return Publisher(self._settings, linger_ms=_LINGER_MS, cut_beyond=cut_beyond, own=own)

    def _say(self, why: str | None) -> None:
        if (why is None) != (self._away is None):
            log.warning("kafka_away", why=why) if why is not None else log.info("kafka_back")
        self._away = why


async def gather_all(awaitables: Iterable[Awaitable[_T]]) -> list[_T]:
    """Run all awaitables at once, and return their results in the order of the awaitables.

    If some raise an error, the first one in that order is raised, but only when all awaitables have ended.
    """
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[_T]", results)


def _is_on(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
