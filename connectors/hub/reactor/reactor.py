"""The reactor: appends the records that follow from settled records in other streams.

Delivers: every derived record at least once, under an id that depends on its cause alone. The fold accepts the
first one and calls the others duplicates. Any number of reactors share the partitions as one consumer group.
Acknowledges when: Kafka has acknowledged the records derived from a poll. Only then are offsets committed.
Loses when: Kafka refuses a derived record because of its content. The reactor logs that and goes on.

Without committed offsets (a new group, or Kafka has forgotten an old one) the reactor begins with the log's
first record and derives everything again. But a mailbox remembers its messages for a week and a session its
newest 256 requests. So for causes older than a minute the reactor looks into the ledger, and skips the records
that it has already appended. While the ledger cannot be read, the reactor waits. One poll returns fewer records
than a session remembers.

The copies of a message to a topic are appended a few at a time. Only when all of them have a verdict, the
reactor appends the record that says so (`schemas.effects.topic_effects`). For verdicts on its records see
`own_records`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Final, TypeVar

import structlog

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.live.table_reader import ids_by_door, postings_by_door, refusals_among
from connectors.hub.reactor.derived_records import (
    XML_DOOR,
    FewNotices,
    SessionsByJob,
    TopicsBySubscriber,
    acknowledged_by,
    cause_of,
    derived_records,
)
from connectors.hub.reactor.own_records import OwnAnswers, has_own_verdict, report_rejection
from connectors.log.publisher import Append, Publisher, RecordRefused
from connectors.log.topic_consumer import GroupTail
from connectors.plumbing.mqtt_link.payloads import MQTT_DOOR as MQTT
from connectors.plumbing.network.rates import Backoff
from schemas.effects.following import DOOR, Cause
from schemas.effects.schedule_effects import message_id_of, refusal_of_run
from schemas.effects.topic_effects import TOPIC_DOOR, Delivery, delivery_of, recipient_of
from schemas.fold.view_rows import Row
from schemas.settings.settings import Settings
from schemas.streams.control.organism import ListenerRow
from schemas.streams.mailboxes.message import MessageRow
from schemas.streams.schedule.schedule_registry import SCHEDULE_RAN, ScheduleRan
from schemas.streams.session.sessions import SessionRow
from schemas.streams.topic.topic_registry import SubscriptionRow
from schemas.wire.record import OutgoingRecord, Position, Record
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.wire.verdicts import REJECTED

log = structlog.stdlib.get_logger(__name__)

_Found = TypeVar("_Found")
_POLL_S: Final = 0.2
_POLL_RECORDS: Final = 100
_TOGETHER_S: Final = 0.02
# Offsets are committed after about so many copies: Kafka drops a reactor that does not poll for five minutes.
_COPIES_AT_ONCE: Final = 20_000
_UNACKNOWLEDGED_MOST: Final = 2000
_OLD_S: Final = 60.0
# A mailbox knows the ids of its messages for at least a week.
_FORGOTTEN_S: Final = 6 * 24 * 3600.0
# The greatest difference between the clocks of two brokers.
_CLOCKS_APART_S: Final = 60.0
_SETTLE_TICK_S: Final = 0.5
# A closed live view answers at once, so a pause is needed.
_CLOSED_TICK_S: Final = 0.02
_STOP_S: Final = 10.0
# A record that is forgotten is refused, and logged, once more if its cause comes again.
_REFUSED_MOST: Final = 10_000
_ACK_GRACE_S: Final = 5.0
# The part of Kafka's record limit that is reserved for headers.
_HEADERS_BYTES: Final = 8 * 1024


class Reactor:
    """A thread that reads the log and appends the records derived from it.

    The reactors of several gateways share the partitions in one consumer group,
    `settings.gateway.reactor_group`. Create the reactor before the live view is opened. Call `start` once and
    `stop` once.

    Args:
        settings: The settings of Kafka and of the group.
        live_view: The live view, which must be open when `start` is called.
        step: Called on the thread with the name of each step, so that a test can interrupt the reactor there:
            `seen`, `before_append`, `appended`, `acknowledged` or `committed`.
        own_answers: The answers that the gateway of this process appends itself; None: it appends none.
    """

    def __init__(
        self,
        settings: Settings,
        live_view: LiveView,
        step: Callable[[str], None] = lambda _: None,
        own_answers: OwnAnswers | None = None,
    ) -> None:
        self._settings = settings
        self._live_view = live_view
        self._step = step
        self._own_answers = OwnAnswers() if own_answers is None else own_answers
        # The appends of the gateway that the reactor waits for, too, before it commits.
        self._others: list[tuple[OutgoingRecord | None, Append]] = []
        # The runs of schedules whose messages are being posted, by the ids of the messages.
        self._runs: dict[str, ScheduleRan] = {}
        self._stopping = threading.Event()
        self._refused: dict[tuple[str, str], None] = {}
        self._notices = FewNotices()
        self._already: set[str] = set()
        self._posted_already: set[tuple[str, str]] = set()
        self._known_since_s = math.inf
        self._sessions, self._topics = SessionsByJob(), TopicsBySubscriber()
        live_view.on_change(lambda change: self._sessions.add(change.row), [SessionRow])
        live_view.on_change(self._topics.changed, self._topics.follows)
        self._thread = threading.Thread(target=self._run, name="reactor", daemon=True)

    def start(self) -> None:
        """Start the thread and return at once. The thread retries without end while Kafka is unreachable.

        The live view must be open.
        """
        for row in self._live_view.live(SessionRow):
            self._sessions.add(row)
        self._topics.load(self._live_view.live(SubscriptionRow))
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, which leaves the consumer group, and wait at most ten seconds for its end.

        Another or a later reactor repeats the work whose offsets are not committed. The fold counts repeated
        records as duplicates. Without a started thread, `stop` does nothing.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        backoff = Backoff(most_s=2.0)
        while not self._stopping.is_set():
            try:
                self._already, self._posted_already, self._known_since_s = set(), set(), math.inf
                kafka, group = self._settings.kafka, self._settings.gateway.reactor_group
                # A record of an agent grows when it becomes a message. Cut only what Kafka would refuse.
                cut_beyond = kafka.record_limit_bytes - _HEADERS_BYTES
                with (
                    Publisher(self._settings, cut_beyond=cut_beyond) as publisher,
                    closing(GroupTail(kafka, group, self._live_view.shared)) as tail,
                ):
                    while not self._stopping.is_set():
                        if self._turn(tail, publisher):
                            backoff.reset()
                    tail.commit(())
            except BackboneUnreachable as error:
                if backoff.is_to_log(str(error)):
                    log.warning("reactor_waits", why=str(error))
            except Exception:
                log.exception("reactor_failed")
            self._stopping.wait(backoff.next_s())

    def _turn(self, tail: GroupTail, publisher: Publisher) -> bool:
        """Poll, append the derived records, wait for Kafka, commit. Return whether records were polled."""
        polled = tail.poll(_POLL_S, _POLL_RECORDS)
        if not polled:
            tail.commit((), at_once=False)
            return False
        self._step("seen")
        if not self._wait_settled({record.partition: record.offset for record in polled}):
            return False
        oldest_s = min(record.logged_at_us for record in polled) / 1e6
        if oldest_s < min(self._known_since_s, time.time() - _OLD_S):
            self._find_appended_since(oldest_s)
        for records, deliveries in self._parts(polled):
            self._others, self._runs = [], {}
            wanted = [found for record in records for found in self._derive(record)]
            # A repeated cause has the same derived records.
            once, own = {(r.stream, r.ce_id, r.value): r for r in wanted}, bool(self._others)
            appended = self._append([r for r in once.values() if self._is_wanted(r)], publisher)
            reports = self._refused_runs(appended)
            for delivery in deliveries:
                refused = self._deliver(delivery, publisher)
                if refused is None:
                    return False
                reports.append(delivery.delivered(refused))
            self._append([report for report in reports if self._is_wanted(report)], publisher)
            self._step("acknowledged")
            # Nothing follows from most records. A session remembers few requests, so the others cannot wait.
            tail.commit(records, at_once=bool(once or own or deliveries))
            self._step("committed")
        if len(polled) < _POLL_RECORDS:
            self._stopping.wait(_TOGETHER_S)  # more come meanwhile, and each turn costs something
        return True

    def _parts(self, polled: Sequence[Record]) -> Iterator[tuple[list[Record], list[Delivery]]]:
        """Divide records, so that each part has few copies of messages to append, or one message."""
        records: list[Record] = []
        deliveries: list[Delivery] = []
        for record in polled:
            records.append(record)
            delivery = self._derived(record, lambda one: delivery_of(one, self._live_view.get), None)
            if delivery is not None:
                deliveries.append(delivery)
            if sum(len(one.recipients) for one in deliveries) >= _COPIES_AT_ONCE:
                yield records, deliveries
                records, deliveries = [], []
        if records:
            yield records, deliveries

    def _deliver(self, delivery: Delivery, publisher: Publisher) -> list[str] | None:
        """Append the copies of a message and wait for their verdicts.

        Return the recipients whose mailboxes refused their copies; None if the reactor stops before that.
        """
        known = self._copies_appended(delivery)
        waiting: deque[tuple[OutgoingRecord, Append]] = deque()
        placed: list[tuple[OutgoingRecord, Position | None]] = []
        refused: list[str] = []
        for copy in delivery.copies():
            if self._stopping.is_set():
                return None
            if (copy.stream, copy.ce_id) in self._refused or known.get(copy.ce_id) is not None:
                refused.append(recipient_of(copy))
            elif copy.ce_id not in known:
                self._step("before_append")
                waiting.append((copy, publisher.append(copy)))
                self._step("appended")
                if len(waiting) >= _UNACKNOWLEDGED_MOST:
                    placed += self._acknowledge([waiting.popleft()])
        placed += self._acknowledge(waiting)
        if not self._wait_settled({at.partition: at.offset for _, at in placed if at is not None}):
            return None
        return refused + [recipient_of(copy) for copy, at in placed if at is None or self._is_refused(copy, at)]

    def _is_refused(self, posted: OutgoingRecord, at: Position) -> bool:
        """Return whether a mailbox has refused a message that is settled."""
        if self._live_view.get(MessageRow, f"{posted.stream.partition('/')[2]}/{posted.ce_id}") is not None:
            return False
        return self._settled(at).verdict == REJECTED

    def _copies_appended(self, delivery: Delivery) -> dict[str, str | None]:
        """Return the ids of the copies that the ledger has, if mailboxes may have forgotten them.

        Each has the reason of its rejection, None if it was accepted.
        """
        since_s = delivery.row.published_at / 1e6
        if since_s > time.time() - _FORGOTTEN_S:
            return {}
        ids = [delivery.copy_id(recipient) for recipient in delivery.recipients]
        return self._refused_earlier(TOPIC_DOOR, since_s, ids)

    def _refused_runs(self, appended: Sequence[tuple[OutgoingRecord, Position | None]]) -> list[OutgoingRecord]:
        """Wait for the verdicts on the messages of schedules' runs. Return the reports of those refused."""
        earlier = self._runs.keys() & self._already
        refused = self._refused_earlier(DOOR, self._known_since_s, earlier) if earlier else {}
        found = [refusal_of_run(self._runs[one], reason) for one, reason in refused.items() if reason]
        for posted, at in appended:
            run = self._runs.get(posted.ce_id)
            settled = None if run is None or at is None else self._settled(at)
            if run is not None and (settled is None or settled.verdict == REJECTED):
                found.append(refusal_of_run(run, None if settled is None else settled.reason))
        return found

    def _refused_earlier(self, door: str, since_s: float, ids: Collection[str]) -> dict[str, str | None]:
        """Return which of these records the ledger has, as `refusals_among` does."""
        try:
            return refusals_among(self._settings, door, since_s - _CLOCKS_APART_S, ids)
        except TrunklineError as error:
            raise BackboneUnreachable(f"cannot read which records were appended before: {error}") from error

    def _wait_settled(self, last: Mapping[int, int]) -> bool:
        """Wait until these offsets, by partition, are settled. Return False if the reactor stops before."""
        for partition, offset in last.items():
            while not self._stopping.is_set():
                try:
                    self._live_view.wait_offset(Position(partition, offset), _SETTLE_TICK_S)
                    break
                except BackboneUnreachable:
                    if self._live_view.failure is not None:
                        raise
                    self._stopping.wait(_CLOSED_TICK_S)
        return not self._stopping.is_set()

    def _derive(self, record: Record) -> list[OutgoingRecord]:
        ack_id = acknowledged_by(record)
        if ack_id is not None:
            appends = self._own_answers.wait(ack_id, self._settings.gateway.settle_timeout_s)
            if appends is not None:
                self._others += [(None, append) for append in appends]
                return []
        return self._derived(record, self._records_of, [])

    def _records_of(self, record: Record) -> list[OutgoingRecord]:
        cause = cause_of(record, self._live_view.get, self._related)
        if cause is None:
            return []
        if has_own_verdict(record):
            report_rejection(self._ask(cause))
        found = derived_records(cause, self._ask)
        if cause.record_type == SCHEDULE_RAN:
            run = cause.body_as(ScheduleRan) if found else None
            self._runs |= {} if run is None else {message_id_of(run): run}
        return self._notices.first(found) if cause.verdict == REJECTED else found

    def _ask(self, cause: Cause) -> SettledRecord:
        """Wait for the verdict on a record, and note it in `cause`."""
        settled = self._settled(Position(cause.record.partition, cause.record.offset))
        cause.verdict, cause.reason, cause.why = settled.verdict, settled.reason, settled.why
        return settled

    def _related(self, row_type: type[Row], name: str) -> Iterable[str]:
        if row_type is ListenerRow:
            return [row.listener for row in self._live_view.all(ListenerRow)]
        return self._sessions.made_for(name) if row_type is SessionRow else self._topics.topics_of(name)

    @staticmethod
    def _derived(record: Record, derive: Callable[[Record], _Found], otherwise: _Found) -> _Found:
        """Return what `derive` finds for a record, or `otherwise` after a bug in it."""
        try:
            return derive(record)
        except BackboneUnreachable:
            raise
        except Exception:
            log.exception("follow_up_failed", partition=record.partition, offset=record.offset)
            return otherwise

    def _settled(self, position: Position) -> SettledRecord:
        """Return how a record was settled. Raises BackboneUnreachable while that is unknown."""
        try:
            return self._live_view.wait_settled(position, self._settings.gateway.settle_timeout_s)
        except TrunklineError as error:
            raise BackboneUnreachable(f"the verdict of a record is unknown: {error}") from error

    def _is_wanted(self, record: OutgoingRecord) -> bool:
        identity = (record.stream, record.ce_id)
        # An agent's message has the id that the agent chose. Another agent may have used it in another mailbox.
        is_posted = record.door in (MQTT, XML_DOOR)
        already = identity in self._posted_already if is_posted else record.ce_id in self._already
        return not already and identity not in self._refused

    def _append(
        self, wanted: Sequence[OutgoingRecord], publisher: Publisher
    ) -> list[tuple[OutgoingRecord, Position | None]]:
        """Append and wait for all acknowledgements. Returns and raises as `_acknowledge` does."""
        waiting, self._others = self._others, []
        for one in wanted:
            self._step("before_append")
            waiting.append((one, publisher.append(one)))
            self._step("appended")
        return self._acknowledge(waiting)

    def _acknowledge(
        self, waiting: Iterable[tuple[OutgoingRecord | None, Append]]
    ) -> list[tuple[OutgoingRecord, Position | None]]:
        """Wait for Kafka's acknowledgements of appends. Raises BackboneUnreachable: then start again.

        Returns the place of each record, None if Kafka has refused it. The gateway's own answers have none.
        """
        failure: BackboneUnreachable | None = None
        placed: list[tuple[OutgoingRecord, Position | None]] = []
        for record, append in waiting:
            at: Position | None = None
            try:
                at = append.result(self._settings.kafka.delivery_timeout_s + _ACK_GRACE_S)
            except RecordRefused as error:
                if record is not None:
                    self._refused[record.stream, record.ce_id] = None
                    if len(self._refused) > _REFUSED_MOST:
                        del self._refused[next(iter(self._refused))]
                log.error("follow_up_refused", stream=None if record is None else record.stream, why=str(error))
            except BackboneUnreachable as error:
                failure = error
            if record is not None:
                placed.append((record, at))
        if failure is not None:
            raise failure
        return placed

    def _find_appended_since(self, oldest_s: float) -> None:
        # A derived record is logged after its cause.
        since_s = oldest_s - _CLOCKS_APART_S
        try:
            self._already = ids_by_door(self._settings, DOOR, since_s)
            by_mqtt, by_xml = (postings_by_door(self._settings, door, since_s) for door in (MQTT, XML_DOOR))
            self._posted_already = by_mqtt | by_xml
            self._known_since_s = oldest_s
        except TrunklineError as error:
            raise BackboneUnreachable(f"cannot read which records were appended before: {error}") from error
