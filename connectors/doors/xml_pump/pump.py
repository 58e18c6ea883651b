"""The pump: it decides how many messages run at once, leases them, and reports their outcome (XP-08).

**Delivers** each leased message to its listener, and the listener's answers to the gateway. **Acknowledges
when** the handler has ended; the acknowledgement contains the answers. **Loses when** never: the messages that
a killed pump held are leased again, and answers whose acknowledgement came too late are not sent.

It leases no more messages than it has places for, and asks again when a place gets free. A message that was
leased before, by a pump that may have died of it, runs alone: the pump waits until all handlers have ended and
leases one such message. Half of the time it goes on with the others. It does not wait long for a slow handler;
then the turn of these messages comes later.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, TypeVar

import structlog

from connectors.doors.xml_pump.dispatcher import Delivered, Dispatcher
from connectors.doors.xml_pump.gateway_link import AWAY_S, GatewayLink, Leased
from connectors.doors.xml_pump.listener_table import ListenerTable, TableMaker, TokenRate
from connectors.doors.xml_pump.settling import Settler
from connectors.plumbing.network.rates import Backoff
from connectors.plumbing.xml_payloads.deliveries import NACK, Done, LeasedMessage
from trunkline_agent.errors import BackboneUnreachable

log = structlog.stdlib.get_logger(__name__)

_Found = TypeVar("_Found")

_POLLS: Final = 4
# Short enough that a pump that is to end need not cancel a waiting request.
_WAIT_MS: Final = 1000
# A further request waits a shorter time, because the first one may not know of a free place.
_MORE_WAIT_MS: Final = 250
# Pauses of the pump after an empty answer.
_REST_S: Final = 0.1
_ALONE_REST_S: Final = 0.5
_TURN_S: Final = (0.05, 5.0)
# The longest time that the pump leases nothing, in order to handle a message alone.
_DRAIN_S: Final = 5.0
_FINISH_S: Final = 8.0
_TELL_S: Final = 3.0


class Pump:
    """One pump in one event loop: it leases messages, runs their handlers and reports the outcomes.

    Create it, and then await `run`, which does all of that.

    Args:
        name: The name under which the gateway stores the leases.
        link: The requests to the gateway.
        maker: Makes the table of listeners at the start and after each change of the organism.
        dispatcher: Makes the dispatcher. Its argument is a function that counts the tokens of a listener.
        settler: Reports the outcomes.
        concurrency: The number of messages that the pump handles at once.
        share: This pump's part of each limit of tokens per minute, from 0 to 1.
        finish_s: How many seconds to wait for running handlers at the end.
        drain_s: The longest time in seconds that the pump leases nothing, in order to handle a message alone.
    """

    def __init__(
        self,
        name: str,
        link: GatewayLink,
        maker: TableMaker,
        dispatcher: Callable[[Callable[[str, int], None]], Dispatcher],
        settler: Settler,
        *,
        concurrency: int,
        share: float = 1.0,
        finish_s: float = _FINISH_S,
        drain_s: float = _DRAIN_S,
    ) -> None:
        self.name = name
        self._link = link
        self._maker = maker
        self._dispatcher = dispatcher(self._spent)
        self._settler = settler
        self._concurrency = concurrency
        self._share = share
        self._finish_s = finish_s
        self._drain_s = drain_s
        self._table = ListenerTable()
        self._changing = asyncio.Lock()
        self._rates: dict[str, TokenRate] = {}
        self._under_way: Counter[str] = Counter()
        self._runs: dict[asyncio.Task[None], LeasedMessage] = {}
        # Each open request asks for places by listener, and for a number of places in all.
        self._polls: dict[asyncio.Task[None], tuple[Mapping[str, int], int]] = {}
        self._news = asyncio.Event()
        self._stopping = False
        self._failure: BaseException | None = None
        self._redelivered = 0
        self._redelivered_turn_at = 0.0
        self._ask_at = 0.0
        self._away = Backoff(*AWAY_S)
        self._vain_s = 0.0
        self._strays = 0

    @property
    def under_way(self) -> list[LeasedMessage]:
        """The leased messages whose handlers run now, or whose outcome is not reported yet.

        A new list each time.
        """
        return list(self._runs.values())

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Lease and handle messages until `stop` is set. Then wait some seconds for the running handlers.

        Messages whose handlers do not end in time go back to their mailboxes. While the gateway does not
        answer, the pump retries without limit. `ready` is called once, when the listeners are loaded. It is not
        called if `stop` is set before.

        Raises:
            Refused: The gateway does not accept the pump's token.
            NotTaken: The gateway refuses a request of the pump as wrong.
        """
        watch = asyncio.create_task(self._watch(stop))
        try:
            released = await self._until_there("started", lambda: self._link.started(self.name))
            if released is not None:
                log.info("started", pump=self.name, released=released)
                await self._change(None)
                ready()
            while not self._stopping:
                if self._failure is not None:
                    raise self._failure
                if self._redelivered and time.monotonic() >= self._redelivered_turn_at:
                    await self._run_alone()
                else:
                    self._ask()
                    await self._news_within(1.0)
        finally:
            self._stopping = True
            watch.cancel()
            await self._end()

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._stopping = True
        self._news.set()

    async def _news_within(self, seconds: float) -> None:
        """Wait until a request or a handler has ended, or a signal came, for at most this time."""
        left = self._ask_at - time.monotonic()
        soonest = min(seconds, left) if left > 0 else seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.001, soonest)):
                await self._news.wait()
        self._news.clear()

    def _ask(self) -> None:
        """Lease messages if there are places that no open request asks for."""
        if len(self._polls) >= _POLLS or time.monotonic() < self._ask_at:
            return
        asked: Counter[str] = Counter()
        for wanted, _ in self._polls.values():
            asked.update(wanted)
        free = self._concurrency - len(self._runs) - sum(places for _, places in self._polls.values())
        wants = {name: most for name in self._table.runnable if (most := self._places(name, asked[name])) > 0}
        if free <= 0 or (self._polls and all(asked[name] for name in wants)):
            return
        wait_ms = _MORE_WAIT_MS if self._polls else _WAIT_MS
        task = asyncio.create_task(self._poll(wants, free, wait_ms))
        self._polls[task] = (wants, free)
        task.add_done_callback(self._poll_ended)

    def _places(self, name: str, asked: int) -> int:
        busy = self._under_way[name] + asked
        most = self._table.listeners[name].concurrency - busy
        rate = self._rates.get(name)
        return most if rate is None else rate.places(busy, max(0, most))

    async def _poll(self, wants: Mapping[str, int], free: int, wait_ms: int) -> None:
        begun = time.monotonic()
        leased = await self._lease(wants, free, wait_ms, alone=False)
        if leased is None:
            return
        await self._take(leased)
        now = time.monotonic()
        if not leased.messages and now - begun < wait_ms / 2000:
            # The gateway answered at once, and would do so again.
            self._ask_at = now + _REST_S
            if leased.redelivered and not self._vain_s:
                self._redelivered_turn_at = now  # no other message needs the time

    async def _lease(self, wants: Mapping[str, int], free: int, wait_ms: int, *, alone: bool) -> Leased | None:
        """Return the leased messages.

        None means that the gateway is away, after a pause, or that the pump is to end.
        """
        version = self._table.version
        return await self._until_there(
            "lease", lambda: self._link.lease(self.name, wants, free, wait_ms, version, alone=alone), once=True
        )

    def _poll_ended(self, task: asyncio.Task[None]) -> None:
        del self._polls[task]
        self._note_failure(task)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
        self._news.set()

    async def _take(self, leased: Leased) -> None:
        """Start the handlers of the leased messages, with the current listeners."""
        self._redelivered = leased.redelivered
        if not leased.redelivered:
            self._vain_s = 0.0
        if leased.version != self._table.version and not self._stopping:
            await self._change(leased.version)
        for message in leased.messages:
            task = asyncio.create_task(self._handle(message, self._table))
            self._runs[task] = message
            self._under_way[message.listener] += 1
            task.add_done_callback(self._run_ended)

    def _run_ended(self, task: asyncio.Task[None]) -> None:
        message = self._runs.pop(task)
        self._under_way[message.listener] -= 1
        self._note_failure(task)

    async def _handle(self, message: LeasedMessage, table: ListenerTable) -> None:
        try:
            if self._stopping:
                raise asyncio.CancelledError
            delivered = await self._dispatcher.deliver(message, table)
        except asyncio.CancelledError:
            delivered = Delivered(Done(message, NACK, "the pump ends"))
        await self._settler.settle(delivered.done)
        if delivered.stray is not None and not self._stopping:
            # The handler keeps its place until it has really ended.
            log.error("handler_ignores_cancel", listener=message.listener, message_id=message.message_id)
            self._strays += 1
            self._news.set()
            try:
                await asyncio.wait({delivered.stray})
            finally:
                self._strays -= 1

    def _is_busy(self) -> bool:
        """Return whether a message is in progress whose outcome was not reported yet."""
        return len(self._runs) > self._strays

    async def _run_alone(self) -> None:
        """Wait until all handlers have ended, then handle one message that was leased before."""
        deadline = time.monotonic() + self._drain_s
        while (self._is_busy() or self._polls) and not self._stopping and self._failure is None:
            left = deadline - time.monotonic()
            if left <= 0:
                # The slow handler may run for an hour, and other messages have places.
                self._postpone_redelivered(self._drain_s)
                return
            await self._news_within(min(1.0, left))
        if self._stopping or self._failure is not None:
            return
        begun = time.monotonic()
        leased = None
        if len(self._runs) < self._concurrency:
            wants = {name: 1 for name in self._table.runnable if self._places(name, 0) > 0}
            leased = await self._lease(wants, 1, 0, alone=True)
        if leased is not None:
            await self._take(leased)
        if leased is None or not leased.messages:
            # Another pump has the message, or its listener has no place now.
            self._postpone_redelivered(_ALONE_REST_S)
            return
        self._vain_s = 0.0
        while self._is_busy() and not self._stopping and self._failure is None:
            await self._news_within(1.0)
        took_s = min(max(time.monotonic() - begun, _TURN_S[0]), _TURN_S[1])
        self._redelivered_turn_at = time.monotonic() + took_s

    def _postpone_redelivered(self, least_s: float) -> None:
        """Postpone the next turn of messages that were leased before, longer each time."""
        self._vain_s = min(max(self._vain_s * 2, least_s), _TURN_S[1])
        self._redelivered_turn_at = time.monotonic() + self._vain_s

    async def _change(self, version: int | None) -> None:
        """Load the listeners again, unless another task just did."""
        async with self._changing:
            if version == self._table.version:
                return
            found = await self._until_there("listeners", self._link.listeners)
            if found is None:
                return
            version, infos = found
            # Importing a handler may take long, and other handlers run.
            self._table = await asyncio.to_thread(self._maker.make, version, infos)
            limits = {one.name: one.tokens_per_minute for one in infos if one.tokens_per_minute is not None}
            self._rates = {name: self._rate(name, limit) for name, limit in limits.items()}
            log.info("listeners", version=version, listeners=len(infos), runnable=len(self._table.runnable))

    def _rate(self, name: str, limit: int) -> TokenRate:
        rate = self._rates.get(name) or TokenRate(limit)
        rate.per_minute = limit * self._share
        return rate

    def _spent(self, name: str, tokens: int) -> None:
        rate = self._rates.get(name)
        if rate is not None:
            rate.spend(tokens)

    async def _until_there(
        self, what: str, ask: Callable[[], Awaitable[_Found]], *, once: bool = False
    ) -> _Found | None:
        """Return the answer; while the gateway is away, ask again after growing pauses, unless `once`.

        None means that there is no answer, or that the pump is to end.
        """
        while not self._stopping:
            try:
                found = await ask()
                self._away.reset()
                return found
            except BackboneUnreachable as error:
                wait_s = self._away.next_s()
                log.warning("gateway_away", what=what, why=str(error), wait_s=wait_s)
                await self._pause(wait_s)
            if once:
                break
        return None

    async def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.1))

    async def _end(self) -> None:
        """Wait for the running handlers and the reports; give back the messages of handlers that do not end."""
        if self._polls or self._runs:
            log.info("ending", under_way=len(self._runs))
        deadline = time.monotonic() + self._finish_s
        while (pending := self._tasks()) and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait(pending, timeout=left)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_TELL_S)
        self._settler.give_up()
        for task in self._tasks():
            task.cancel()

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {*self._polls, *self._runs}
