"""The reactor: appends what follows from settled records in other streams, each follow-up once.

Delivers: every follow-up at least once, under an id that hangs on its cause alone; the fold takes the first
and calls the others duplicates. Any number of reactors share the partitions as one consumer group.
Acknowledges when: Kafka has acknowledged the follow-ups of what was polled; only then are offsets committed.
Loses when: Kafka refuses a follow-up for its own sake; that is logged, and the reactor goes on.

Without committed offsets (a new group, or Kafka has forgotten an old one) it begins with the log's first
record and derives everything again. But a mailbox knows its messages for a week and a session its newest 256
requests: so for causes older than a minute the ledger is asked, and what it has of this door since then is not
appended again; while it cannot be read, the reactor waits. What is polled at once is less than a session knows.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Final

import structlog

from connectors.live.live_view import LiveView
from connectors.live.settled_feed import SettledRecord
from connectors.live.verdict_reader import ids_by_door, postings_by_door
from connectors.log.group_tail import GroupTail
from connectors.log.publisher import Append, Position, Publisher, RecordRefused
from connectors.mqtt_bridge.bridge_records import DOOR as MQTT
from connectors.reactor.follow_ups import DOOR, follow_ups
from connectors.reactor.verdict_follow_ups import follow_ups_of_verdict, hangs_on_verdict
from connectors.reactor.xml_follow_ups import XML_DOOR, may_lead_to_more, xml_follow_ups
from schemas.errors import BackboneUnreachable, TrunklineError
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import REGISTRY_SESSIONS, Row, SessionRow
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord, Record

log = structlog.stdlib.get_logger(__name__)

_POLL_S: Final = 0.2
_POLL_RECORDS: Final = 100
_OLD_S: Final = 60.0
# How far the clocks of two brokers may be apart.
_CLOCKS_APART_S: Final = 60.0
_SETTLE_TICK_S: Final = 0.5
# A live view that was closed answers at once.
_CLOSED_TICK_S: Final = 0.02
_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
_STOP_S: Final = 10.0
_ACK_GRACE_S: Final = 5.0
# What the headers of a record may take of what Kafka lets through.
_HEADERS_BYTES: Final = 8 * 1024


def _no_step(name: str) -> None:
    """What is called at each step: `seen`, `before_append`, `appended`, `acknowledged`, `committed`."""


class Reactor:
    """Follows the topic in the group `settings.gateway.reactor_group`. `start` it once, `stop` it once.

    `step` is called on its thread at each step: tests kill the process there.
    """

    def __init__(self, settings: Settings, live_view: LiveView, step: Callable[[str], None] = _no_step) -> None:
        self._settings = settings
        self._live_view = live_view
        self._step = step
        self._stopping = threading.Event()
        self._refused: set[tuple[str, str]] = set()
        self._already: set[str] = set()
        self._posted_already: set[tuple[str, str]] = set()
        self._known_since_s = math.inf
        self._sessions = _SessionsByJob()
        live_view.on_change(self._sessions.changed)
        self._thread = threading.Thread(target=self._run, name="reactor", daemon=True)

    def start(self) -> None:
        """Start its thread and return at once; it connects by itself, for as long as it takes."""
        self._sessions.load(self._live_view.rows(REGISTRY_SESSIONS))
        self._thread.start()

    def stop(self) -> None:
        """End it and leave the group. What is not committed is done again by the next one."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            try:
                self._forget_appended()
                # What an agent said is longer as a message; only what Kafka would refuse is cut.
                cut_beyond = self._settings.kafka.record_limit_bytes - _HEADERS_BYTES
                with Publisher(self._settings, cut_beyond=cut_beyond) as publisher:
                    kafka = self._settings.kafka
                    with closing(GroupTail(kafka, self._settings.gateway.reactor_group)) as tail:
                        while not self._stopping.is_set():
                            if self._turn(tail, publisher):
                                attempt = 0
            except BackboneUnreachable as error:
                log.warning("reactor_waits", why=str(error))
            except Exception:
                log.exception("reactor_failed")
            self._stopping.wait(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1

    def _turn(self, tail: GroupTail, publisher: Publisher) -> bool:
        """Poll, append what follows, wait for Kafka, commit. Returns whether there was anything."""
        polled = tail.poll(_POLL_S, _POLL_RECORDS)
        if not polled:
            return False
        self._step("seen")
        if not self._wait_settled(polled):
            return False
        oldest_s = min(record.logged_at_us for record in polled) / 1e6
        if oldest_s < min(self._known_since_s, time.time() - _OLD_S):
            self._find_appended_since(oldest_s)
        wanted = [found for record in polled for found in self._derive(record)]
        # A cause that came twice has the same effect twice.
        once = {(r.stream, r.ce_id, r.value): r for r in wanted}
        self._append([r for r in once.values() if self._is_wanted(r)], publisher)
        self._step("acknowledged")
        tail.commit(polled)
        self._step("committed")
        return True

    def _wait_settled(self, polled: Sequence[Record]) -> bool:
        """Wait until the live view has settled all of it; False when the reactor is to stop before that."""
        for position in {
            record.partition: Position(record.partition, record.offset) for record in polled
        }.values():
            while not self._stopping.is_set():
                try:
                    self._live_view.wait_offset(position, _SETTLE_TICK_S)
                    break
                except BackboneUnreachable:
                    if self._live_view.failure is not None:
                        raise
                    self._stopping.wait(_CLOSED_TICK_S)
        return not self._stopping.is_set()

    def _derive(self, record: Record) -> list[OutgoingRecord]:
        row = self._live_view.row
        try:
            found = follow_ups(record, row, self._sessions.made_for)
            if hangs_on_verdict(record, row) or may_lead_to_more(record):
                settled = self._settled(Position(record.partition, record.offset))
                found = [
                    *found,
                    *follow_ups_of_verdict(record, settled.verdict, settled.reason, row),
                    *xml_follow_ups(record, settled.verdict, settled.why, row, self._live_view.rows),
                ]
            return found
        except BackboneUnreachable:
            raise
        except Exception:
            log.exception("follow_up_failed", partition=record.partition, offset=record.offset)
            return []

    def _settled(self, position: Position) -> SettledRecord:
        """How a record was settled. Raises BackboneUnreachable while that is not known: do it all again."""
        try:
            return self._live_view.wait_settled(position, self._settings.gateway.settle_timeout_s)
        except TrunklineError as error:
            raise BackboneUnreachable(f"a verdict is not known: {error}") from error

    def _is_wanted(self, record: OutgoingRecord) -> bool:
        identity = (record.stream, record.ce_id)
        # An agent's message has the id that the agent gave it, which others may have used elsewhere.
        is_posted = record.door in (MQTT, XML_DOOR)
        already = identity in self._posted_already if is_posted else record.ce_id in self._already
        return not already and identity not in self._refused

    def _append(self, wanted: Sequence[OutgoingRecord], publisher: Publisher) -> None:
        """Append and wait for the acknowledgements. Raises BackboneUnreachable: do it all again."""
        waiting: list[tuple[OutgoingRecord, Append]] = []
        for record in wanted:
            self._step("before_append")
            waiting.append((record, publisher.append(record)))
            self._step("appended")
        failure: BackboneUnreachable | None = None
        for record, append in waiting:
            try:
                append.result(self._settings.kafka.delivery_timeout_s + _ACK_GRACE_S)
            except RecordRefused as error:
                self._refused.add((record.stream, record.ce_id))
                log.error("follow_up_refused", stream=record.stream, ce_id=record.ce_id, why=str(error))
            except BackboneUnreachable as error:
                failure = error
        if failure is not None:
            raise failure

    def _forget_appended(self) -> None:
        self._already, self._posted_already, self._known_since_s = set(), set(), math.inf

    def _find_appended_since(self, oldest_s: float) -> None:
        # A follow-up is logged after its cause.
        since_s = oldest_s - _CLOCKS_APART_S
        try:
            self._already = ids_by_door(self._settings, DOOR, since_s)
            by_mqtt, by_xml = (postings_by_door(self._settings, door, since_s) for door in (MQTT, XML_DOOR))
            self._posted_already = by_mqtt | by_xml
            self._known_since_s = oldest_s
        except TrunklineError as error:
            raise BackboneUnreachable(f"what was appended before is not known: {error}") from error


class _SessionsByJob:
    """The sessions that were made for each job. A session's job never changes, so this only grows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, set[str]] = {}

    def load(self, rows: Iterable[Row]) -> None:
        """Add the sessions that were there before the first change was seen."""
        for row in rows:
            self._add(row)

    def changed(self, change: AppliedChange) -> None:
        """Take in a change of a row; called on the live view's thread."""
        if change.view == REGISTRY_SESSIONS:
            self._add(change.row)

    def made_for(self, job_id: str) -> list[str]:
        """Return the names of the sessions that were made for a job, in no order."""
        with self._lock:
            return list(self._names.get(job_id, ()))

    def _add(self, row: Row | None) -> None:
        if isinstance(row, SessionRow) and row.for_job is not None:
            with self._lock:
                self._names.setdefault(row.for_job, set()).add(row.session)
