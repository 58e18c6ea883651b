"""The live view: the fold over the tail of the log, which answers in milliseconds.

Delivers: rows, entries and verdicts as of a position in the log that only rises. Rows that are live are in
memory. The others are in a local store, and are read when they are asked for (decision 0031). The view starts
at the store's place in the log, or from the Delta views if the store cannot be used. Then it follows the topic.
It reconnects for ever while Kafka is unreachable.
Acknowledges when: the record at a position went through the fold; then `wait_settled` returns its verdict.
Loses when: never; the view reads the records after the store's place again at the next start.

The ledger has the verdicts of records that were settled before this view started. `wait_settled` reads them
there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from math import inf
from pathlib import Path
from typing import Final

import structlog

from connectors.hub.live.fold_turns import Batch, FoldTurns, Pace
from connectors.hub.live.live_store import LiveRows, LiveStore
from connectors.hub.live.settled_feed import SettledFeed, SettledRecord, SettledWaits
from connectors.hub.live.table_reader import progress_of_tables, verdict_in_ledger
from connectors.log.log_end import LogEnd
from connectors.log.shared_records import OwnRecord, OwnRecords, SharedRecords, settle_own
from connectors.log.topic_consumer import POLL_RECORDS, LogTail, OffsetsGoneError
from connectors.plumbing.network.rates import Backoff
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings
from schemas.streams.fold import VIEWS
from schemas.tables.fold_version import check_fold_version, check_switch
from schemas.wire.record import Position, Record
from trunkline_agent.errors import BackboneUnreachable, TrunklineError

log = structlog.stdlib.get_logger(__name__)

_POLL_S: Final = 0.2
# So many records are folded in one step of an event loop. None begins after so long: some take milliseconds.
_STEP_RECORDS: Final = 100
_STEP_S: Final = 0.01
_REACH_S: Final = 10.0
_STALLED_S: Final = 60.0
_CLOSE_S: Final = 10.0


class LiveView(LiveRows):
    """The fold over the log: a thread that settles new records, and methods to read the result (`LiveRows`).

    Thread-safe. Call `open` first, which starts the threads, and `close` at the end.

    Args:
        settings: The settings.
        keyring: The master keys.
        folder: The folder of the local store, for this view alone. None: a temporary folder.

    Attributes:
        feed: The newest settled records with their verdicts.
        own: The records that a publisher of this process has sent, and that the view has not settled.
        shared: The newest records, for a second reader of the log in this process.
        failure: The error that ended the view's thread, or None. Then every wait raises BackboneUnreachable.
    """

    def __init__(self, settings: Settings, keyring: Keyring, folder: Path | None = None) -> None:
        self._settings = settings
        self._keyring = keyring
        self._where = folder
        self._store: LiveStore | None = None
        self._waits = SettledWaits()
        self._end = LogEnd(settings.kafka)
        self._progress = threading.Condition()
        self._next: dict[int, int] = dict.fromkeys(range(settings.kafka.partitions), 0)
        self._seen_ends: dict[int, int] = {}
        self._callbacks: dict[str, list[Callable[[AppliedChange], None]]] = {name: [] for name in VIEWS}
        self._watchers: list[Callable[[Sequence[SettledRecord]], None]] = []
        self._closing = threading.Event()
        self._pace = Pace()
        self._turns = FoldTurns()
        self._thread = threading.Thread(target=self._follow, name="live-view", daemon=True)
        self.feed = SettledFeed()
        self.own = OwnRecords()
        self.shared = SharedRecords()
        self.failure: Exception | None = None

    def open(self) -> None:
        """Open the local store, start the thread that follows the log, and wait until the log is settled.

        A store that cannot be used is made again from the view tables. The wait ends when all records are
        settled that were in the log at the time of the call.

        Raises:
            BackboneUnreachable: Kafka does not answer, or no record was settled for a minute.
            TrunklineError: The tables are unreadable, or of another log or fold version, the topic is wrong, or
                another process uses the store.
        """
        check_topic(self._settings)
        check_fold_version(self._settings)
        # In this order, because the tables may grow between the two.
        offsets = progress_of_tables(self._settings)
        ends = self._end.offsets(_REACH_S)
        if any(offset > ends.get(number, 0) for number, offset in offsets.items()):
            raise TrunklineError(
                f"the view tables below {self._settings.tables_root} have offsets {offsets}, but topic "
                f"{self._settings.kafka.topic!r} ends at {ends}: the log has lost "
                "records, or they are of another log; './trunkline log rebuild' makes the log again from the "
                "ledger, or set data_dir or storage.tables to where this log's own tables are"
            )
        self.load(ends)
        self._thread.start()
        before, deadline = -1, 0.0
        while not self._are_settled(ends):
            settled = sum(self._next.values())
            if settled > before:
                before, deadline = settled, time.monotonic() + _STALLED_S
            self._wait_progress(deadline, f"the log up to {ends}")

    def load(self, ends: Mapping[int, int] | None = None) -> None:
        """Open the local store and load what is live into memory; `open` calls this.

        Args:
            ends: The log's end by partition, to compare the store with the log. None: do not compare.

        Raises:
            TrunklineError: The tables are unusable, or another process uses the store.
        """
        self._store = LiveStore(self._settings, self._keyring, self._where, ends, self._give_up)
        self._state = self._store.state
        self._next.update(self._state.place.offsets)
        self.shared.begin(self._next)

    def fold_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fold on an event loop, in steps of 100 records and 10 ms at most, until `leave_loop`."""
        self._turns.use(loop)

    async def leave_loop(self) -> None:
        """Fold on the view's own thread again. Call it on the event loop before it ends."""
        self._turns.use(None)
        while self._turns.batches:
            await asyncio.sleep(0)

    def close(self) -> None:
        """Stop the threads, within twenty seconds. Later waits raise BackboneUnreachable, and reads fail."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self._end.close()
        self._break_waits(BackboneUnreachable("the live view was closed"))
        if self._store is not None:
            self._store.close()

    def next_offsets(self) -> dict[int, int]:
        """Return for each partition the offset of the first record that this view has not settled."""
        return dict(self._next)

    def lag(self) -> dict[int, int]:
        """Return for each partition how many records this view has not settled, by the last known log end."""
        return {number: max(0, self._seen_ends.get(number, 0) - done) for number, done in self._next.items()}

    def on_change(
        self, callback: Callable[[AppliedChange], None], follows: Iterable[type[Row]] | None = None
    ) -> None:
        """Register a function that the fold calls for each row that a record adds, changes or removes.

        Register it before `open`, which also calls it for the records that it settles. Rows loaded from tables
        are not reported. The function must return quickly. Its exceptions are logged and ignored.

        Args:
            callback: The function.
            follows: The types of the rows that it is called for. None: all.
        """
        for view in VIEWS if follows is None else [row.VIEW for row in follows]:
            self._callbacks[view].append(callback)

    def on_settled(self, callback: Callable[[Sequence[SettledRecord]], None]) -> None:
        """Register a function that the fold calls with each batch of newly settled records, in order.

        Register it before `open`. It must return quickly. Its exceptions are logged and ignored.
        """
        self._watchers.append(callback)

    def unwritten(self) -> tuple[int, bool]:
        """Return how many records the local store lacks, and whether its last write succeeded."""
        if self._store is None:
            return 0, True
        return self._store.state.waiting()[0], self._store.trouble is None

    def wait_settled(self, position: Position, timeout_s: float) -> SettledRecord:
        """Wait until the record at `position` is settled, and return it with its verdict.

        A record that is no longer in memory is read from the ledger.

        Raises:
            BackboneUnreachable: The record was not settled within `timeout_s` seconds, or the view was closed
                or failed.
            TrunklineError: The ledger cannot be read.
        """
        deadline = time.monotonic() + timeout_s
        found = self._await(position, timeout_s)
        return found if found is not None else self._look_up(position, deadline)

    def _await(self, position: Position, timeout_s: float) -> SettledRecord | None:
        """Wait until a record is settled. Return it, or None if it is no longer in memory."""
        promise: Future[SettledRecord | None] = Future()
        self._waits.add(position, promise)
        try:
            found, is_to_come = self._known(position)
            return promise.result(timeout_s) if is_to_come else found
        except TimeoutError:
            where = f"offset {position.offset} of partition {position.partition}"
            raise BackboneUnreachable(f"{where} was not settled within {timeout_s:g} s") from None
        finally:
            self._waits.remove(position, promise)

    def wait_offset(self, position: Position, timeout_s: float) -> None:
        """Block until the partition is settled up to and including `position`, that of a record.

        Raises BackboneUnreachable after `timeout_s` seconds, or when the view is closed or has failed.
        """
        if not self._is_settled(position):
            self._await(position, timeout_s)

    def catch_up(self, timeout_s: float) -> None:
        """Ask Kafka for the current end of the log and block until all records before it are settled.

        Raises BackboneUnreachable if that takes longer than `timeout_s` seconds, or Kafka does not answer.
        """
        deadline = time.monotonic() + timeout_s
        ends = self._end.offsets(timeout_s)
        while not self._are_settled(ends):
            self._wait_progress(deadline, "the end of the log")

    def _known(self, position: Position) -> tuple[SettledRecord | None, bool]:
        """Return the record if it is in memory, and whether a promise made before will be resolved."""
        # In this order: a record settled after the first check is found by the second, or resolves a promise.
        settled_before = self._is_settled(position)
        found = self.feed.find(position)
        is_to_come = found is None and not settled_before
        if is_to_come:
            self._check_failure()
        return found, is_to_come

    def _is_settled(self, position: Position) -> bool:
        return position.offset < self._next.get(position.partition, 0)

    def _are_settled(self, ends: dict[int, int]) -> bool:
        return all(self._next[number] >= end for number, end in ends.items())

    def _look_up(self, position: Position, deadline: float) -> SettledRecord:
        """Read a verdict from the ledger: of a record settled before the start, or no longer in memory."""
        backoff = Backoff(0.05, 0.5)
        while (found := verdict_in_ledger(self._settings, position)) is None:
            left = deadline - time.monotonic()
            if left <= 0 or self._closing.wait(min(left, backoff.next_s())):
                break
        else:
            return found
        raise BackboneUnreachable(
            f"offset {position.offset} of partition {position.partition} was settled a while ago and is not "
            f"in memory; the ledger below {self._settings.tables_root} does not have its verdict yet"
        )

    def _wait_progress(self, deadline: float, what: str) -> None:
        """Wait until any record is settled. Raises BackboneUnreachable at the deadline or a failure."""
        with self._progress:
            self._check_failure()
            left = deadline - time.monotonic()
            if left <= 0:
                raise BackboneUnreachable(f"not settled in time: {what}; the live view lags by {self.lag()}")
            self._progress.wait(min(left, 0.5))

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise BackboneUnreachable(f"the live view has stopped: {self.failure}") from self.failure
        if self._closing.is_set():
            raise BackboneUnreachable("the live view was closed")

    # The methods below run on the view's own thread.

    def _follow(self) -> None:
        backoff = Backoff()
        while not self._closing.is_set():
            try:
                with self._turns.alone(self._closing):
                    begin = dict(self._next)
                with LogTail(self._settings.kafka, begin) as tail:
                    while not self._closing.is_set():
                        if self._settle_poll(tail):
                            backoff.reset()
            except OffsetsGoneError as error:
                self._give_up(TrunklineError(f"the log does not have the offsets {self._next}: {error}"))
            except BackboneUnreachable as error:
                pause_s = backoff.next_s()
                if backoff.is_to_log(str(error)):
                    log.warning("kafka_away", why=str(error), again_in_s=pause_s)
                self._closing.wait(pause_s)
            except Exception as error:
                log.exception("live_view_failed")
                self._give_up(error)

    def _settle_poll(self, tail: LogTail) -> bool:
        """Settle the records of one poll, here or on the event loop. Return whether there were any."""
        if (pause_s := self._pace.pause_s()) > 0:
            time.sleep(pause_s)
        records = tail.poll(_POLL_S)
        if self._store is not None:
            self._store.keep_up()
        batch = Batch(deque(records), dict(tail.reached), tail.ends())
        if not self._turns.hand_over(batch, self._fold_on_loop, self._closing):
            with self._turns.alone(self._closing):
                self._fold(batch)
        return bool(records)

    def _fold_on_loop(self) -> None:
        """Fold some records of the oldest batch. The event loop calls it until there is no batch."""
        batch = self._turns.batches[0]
        try:
            self._fold(batch, _STEP_RECORDS, time.monotonic() + _STEP_S)
        except Exception as error:
            log.exception("live_view_failed")
            self._give_up(error)
            batch.records.clear()
        self._turns.done(batch, self._fold_on_loop)

    def _fold(self, batch: Batch, most: int = POLL_RECORDS, until: float = inf) -> None:
        """Settle `most` records of a batch, or those begun before `until`, and tell all that wait for them."""
        if self._closing.is_set():  # none may be settled after one that was not
            batch.records.clear()
            return
        folded, settled, passed_over = list[Record](), list[SettledRecord](), list[Position]()
        reached: dict[int, int] = {}
        own: list[tuple[OwnRecord, SettledRecord | Exception]] = []
        try:
            while batch.records and most and (not reached or time.monotonic() < until):
                record, most = batch.records.popleft(), most - 1
                found = self._state.apply(record, self._changed)
                folded.append(record)
                reached[record.partition] = record.offset + 1
                if (sent := self.own.seen(record)) is not None:
                    own.append((sent, found or BackboneUnreachable("the record was settled before this start")))
                if found is None:
                    passed_over.append(Position(record.partition, record.offset))
                else:
                    check_switch(found.type, found.verdict, found.value)
                    settled.append(found)
        except Exception as error:
            settle_own((sent, BackboneUnreachable(f"the live view has stopped: {error}")) for sent, _ in own)
            raise
        if not batch.records:
            self._seen_ends.update(batch.ends)
            reached = batch.reached
        reached = {number: offset for number, offset in reached.items() if offset > self._next[number]}
        if not reached:
            return
        self.feed.extend(settled)
        self.shared.offer(folded)
        for watcher in self._watchers:
            try:
                watcher(settled)
            except Exception:
                log.exception("on_settled_failed")
        with self._progress:
            self._next.update(reached)
            self._progress.notify_all()
        self._waits.keep(settled, passed_over)
        settle_own(own)
        self._pace.count(len(settled))

    def _changed(self, change: AppliedChange) -> None:
        for callback in self._callbacks[change.view]:
            try:
                callback(change)
            except Exception:
                log.exception("on_change_failed", view=change.view)

    def _give_up(self, error: Exception) -> None:
        self.failure = error
        self._closing.set()
        self._break_waits(BackboneUnreachable(f"the live view has stopped: {error}"))

    def _break_waits(self, error: Exception) -> None:
        with self._progress:
            self._progress.notify_all()
        self._waits.fail(error)
        settle_own((sent, error) for sent in self.own.take_all())
