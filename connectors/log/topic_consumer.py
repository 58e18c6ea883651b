"""Consumers of the one Kafka topic. librdkafka fetches for them outside the interpreter (decision 0023).

`LogTail` reads all partitions from given offsets, for the live view. `GroupTail` is a member of a consumer
group: it reads the partitions that Kafka assigns to it, and commits its progress to Kafka.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

import structlog
from confluent_kafka import Consumer, KafkaException
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import TopicPartition as Partition

from connectors.log.kafka_libraries import client_options, message_record, with_all_headers
from connectors.log.shared_records import SharedRecords
from schemas.log_access.event_topic import reach_kafka
from schemas.log_access.kafka_clients import librdkafka_unreachable
from schemas.settings.settings import KafkaSettings
from schemas.wire.record import Record
from trunkline_agent.errors import BackboneUnreachable, TrunklineError

log = structlog.stdlib.get_logger(__name__)

# The client recovers from all other errors by itself.
_UNREACHABLE: Final = (
    ClientError._ALL_BROKERS_DOWN,
    ClientError._AUTHENTICATION,
    ClientError.TOPIC_AUTHORIZATION_FAILED,
    ClientError.UNKNOWN_TOPIC_OR_PART,
)
# Few enough that the first record of a full poll does not wait long for its verdict.
POLL_RECORDS: Final = 500
_LOG_TAIL_OPTIONS: Final = {
    "client.id": "trunkline-live-view",
    # The client requires a name, but joins no group: it assigns its partitions itself, commits no offset, and
    # needs no permission for the group.
    "group.id": "trunkline-live-view",
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 500,
    # The client fetches ahead while fewer records than this wait in it.
    "queued.min.messages": 20 * POLL_RECORDS,
}
_JOINED_WITHIN_S: Final = 20.0
_COMMIT_S: Final = 1.0
_COMMITTED_S: Final = 2.0
_GROUP_TAIL_OPTIONS: Final = {
    # The smallest value that a broker accepts by default. The partitions of a killed member are idle so long.
    "session.timeout.ms": 6_000,
    "heartbeat.interval.ms": 1_500,
    "auto.offset.reset": "earliest",
    # A derived record may be a quarter of a second late. To fetch each record by itself costs more than all
    # else.
    "fetch.min.bytes": 64 * 1024,
    "fetch.wait.max.ms": 250,
    "queued.min.messages": 1000,
}


class TopicConsumer:
    """A librdkafka consumer of the topic, for one thread. End it with `close`.

    Args:
        kafka: The settings of Kafka.
        options: librdkafka's options beside those of every consumer here; its CONFIGURATION.md explains them.

    Raises:
        BackboneUnreachable: No bootstrap server accepts a connection.
    """

    def __init__(self, kafka: KafkaSettings, options: Mapping[str, Any]) -> None:
        reach_kafka(kafka)
        self._kafka = kafka
        self._error: ClientError | None = None
        self.client: Any = Consumer({**_options(kafka), **options, "error_cb": self._on_error})

    def messages(self, timeout_s: float, most: int) -> list[Any]:
        """Return the next messages, at most `most`; an empty list if none arrives within `timeout_s` seconds.

        They are objects of confluent_kafka.Message. An error of a single partition, and the end of a partition,
        are returned as messages whose `error()` is not None.

        Raises:
            BackboneUnreachable: Kafka is unreachable or denies access.
        """
        first = self.client.poll(timeout_s)
        if self._error is not None:
            raise librdkafka_unreachable(self._kafka, self._error, "")
        return [] if first is None else [first, *self.client.consume(most - 1, 0)]

    def trouble(self, error: ClientError) -> BackboneUnreachable:
        """Return a BackboneUnreachable exception for an error of the client, which the caller then raises.

        Its message names the brokers, the topic and the reason.
        """
        return librdkafka_unreachable(self._kafka, error, f", topic {self._kafka.topic!r}")

    def close(self) -> None:
        """Close the connection to Kafka. A member of a consumer group leaves the group."""
        self.client.close()

    def _on_error(self, error: ClientError) -> None:
        """Keep the first error of the client; called within `poll`.

        The last error of several only says that all brokers are down.
        """
        if self._error is None and (error.fatal() or error.code() in _UNREACHABLE):
            self._error = error


def _options(kafka: KafkaSettings) -> dict[str, Any]:
    return {
        **client_options(kafka),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # As Spark reads: both must see the same records.
        "isolation.level": "read_uncommitted",
        "fetch.message.max.bytes": max(1024 * 1024, kafka.record_limit_bytes),
        "queued.max.messages.kbytes": max(16 * 1024, 4 * kafka.record_limit_bytes // 1024),
        # The client pauses while more than `queued.min.messages` wait in it; by default for a second.
        "fetch.queue.backoff.ms": 10,
        "socket.timeout.ms": 10_000,
        # The client reports an unknown topic after so long.
        "topic.metadata.propagation.max.ms": 2000,
    }


class OffsetsGoneError(TrunklineError):
    """The log does not have an offset from which a LogTail has to read: it was deleted or never existed."""


class LogTail(TopicConsumer):
    """A reader of all partitions of the log, for one thread. A context manager.

    Args:
        kafka: The settings of Kafka.
        offsets: The offset to start from, by partition; 0 for partitions that are not named.

    Attributes:
        reached: The offset after the last one that was read, by partition. Offsets without a record, such as
            the end of a transaction, count as read.

    Raises:
        BackboneUnreachable: No bootstrap server accepts a connection.
    """

    def __init__(self, kafka: KafkaSettings, offsets: Mapping[int, int]) -> None:
        super().__init__(kafka, _LOG_TAIL_OPTIONS)
        self.reached: dict[int, int] = {}
        self._where = [
            Partition(kafka.topic, number, offsets.get(number, 0)) for number in range(kafka.partitions)
        ]
        self.client.assign(self._where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def poll(self, timeout_s: float) -> list[Record]:
        """Return the next records, at most 500; an empty list if none arrives within `timeout_s` seconds.

        Raises:
            OffsetsGoneError: The log does not have the offset to read from.
            BackboneUnreachable: Kafka is unreachable or denies access.
        """
        found = []
        for one in self.messages(timeout_s, POLL_RECORDS):
            if one.error() is not None:
                self._handle_error(one)
                continue
            found.append(message_record(one))
            self.reached[one.partition()] = one.offset() + 1
        return with_all_headers(self._kafka, found)

    def ends(self) -> dict[int, int]:
        """Return the log's end in each partition as of Kafka's last answer, without asking Kafka.

        Partitions for which Kafka has not answered yet are absent.
        """
        known = {one.partition: self.client.get_watermark_offsets(one, cached=True) for one in self._where}
        return {number: found[1] for number, found in known.items() if found is not None and found[1] >= 0}

    def _handle_error(self, message: Any) -> None:
        error = message.error()
        if error.code() == ClientError._PARTITION_EOF:
            self.reached[message.partition()] = message.offset()
            return
        if error.code() == ClientError.GROUP_AUTHORIZATION_FAILED:
            return  # the client looks for a coordinator of the group, and needs none
        if error.code() in (ClientError._AUTO_OFFSET_RESET, ClientError.OFFSET_OUT_OF_RANGE):
            raise OffsetsGoneError(error.str())
        raise self.trouble(error)


class GroupTail(TopicConsumer):
    """A member of a Kafka consumer group that reads the partitions which Kafka assigns to it. For one thread.

    It reads from the offsets that the group has committed. A new group, or one whose offsets the log no longer
    has, begins with the log's first record. End it with `close`.

    Args:
        kafka: The settings of Kafka.
        group: The name of the group.
        shared: The newest records, which another reader of this process passes on. Only older ones are fetched
            from Kafka. None: all are fetched.

    Raises:
        BackboneUnreachable: No bootstrap server accepts a connection.
    """

    def __init__(self, kafka: KafkaSettings, group: str, shared: SharedRecords | None = None) -> None:
        names = {"client.id": "trunkline-reactor", "group.id": group}
        super().__init__(kafka, _GROUP_TAIL_OPTIONS | names)
        self._group = group
        self._shared = SharedRecords() if shared is None else shared
        # By assigned partition: the offset to go on from, None if only Kafka knows.
        self._places: dict[int, int | None] = {}
        # The partitions whose records come from `_shared`. The client has paused them.
        self._joined: set[int] = set()
        self._done: dict[int, int] = {}
        self._committed_at = 0.0
        self._revoked = False
        # Since when this member waits for its partitions; None while they are assigned.
        self._unassigned_since: float | None = time.monotonic()
        self.client.subscribe([kafka.topic], on_assign=self._assign, on_revoke=self._revoke)

    def poll(self, timeout_s: float, most: int) -> list[Record]:
        """Return the next records, at most `most`; an empty list if none arrives within `timeout_s` seconds.

        The list is also empty if Kafka took partitions from this member during the call. The next call then
        begins at the committed offsets, so records without a commit are returned again.

        Raises:
            BackboneUnreachable: Kafka is unreachable or denies access. Close the tail then: another poll would
                skip the records that the client had already fetched.
        """
        self._revoked = False
        places = {number: self._places[number] or 0 for number in self._joined}
        if places and len(places) == len(self._places):
            # Kafka has nothing to fetch here, so this is where to wait.
            self._shared.wait(timeout_s)
            timeout_s = 0
        shared = self._shared.take(places, most)
        messages = self.messages(0 if shared else timeout_s, most)
        self._log_unassigned()
        if self._revoked:
            self._begin_at_committed()
            return []
        found = []
        for one in messages:
            if one.error() is not None:
                raise self.trouble(one.error())
            if one.partition() not in self._joined:  # the client had fetched it before it paused
                found.append(message_record(one))
        found = shared + with_all_headers(self._kafka, found)
        self._places.update({record.partition: record.offset + 1 for record in found})
        try:
            self._join()
        except KafkaException as error:
            raise self.trouble(error.args[0]) from error
        return found

    def commit(self, records: Iterable[Record], *, at_once: bool = True) -> None:
        """Record in Kafka that the group has processed these records and all before them in their partitions.

        The call waits for Kafka's answer. If there are no such records, the call does nothing. Without
        `at_once`, it does so once a second at most, and a later call also commits these.

        Raises:
            BackboneUnreachable: Kafka is unreachable, or has assigned a partition to another member.
        """
        for record in records:
            self._done[record.partition] = max(record.offset + 1, self._done.get(record.partition, 0))
        now_s = time.monotonic()
        if not self._done or not (at_once or now_s - self._committed_at >= _COMMIT_S):
            return
        offsets = [Partition(self._kafka.topic, number, offset) for number, offset in self._done.items()]
        self._done, self._committed_at = {}, now_s
        try:
            committed = self.client.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            raise self.trouble(error.args[0]) from error
        for one in committed:
            if one.error is not None:
                raise self.trouble(one.error)

    def _begin_at_committed(self) -> None:
        """Seek back to the committed offsets of the assigned partitions.

        One poll may revoke partitions, assign others and read them. It is unknown which of its records were
        read before. To drop them without seeking would skip them, because the client's position is behind them.
        """
        try:
            if ours := self.client.assignment():
                self.client.assign([Partition(one.topic, one.partition) for one in ours])
            self._note_places(ours)
        except KafkaException as error:
            raise self.trouble(error.args[0]) from error

    def _assign(self, consumer: Any, partitions: list[Partition]) -> None:
        """Note that partitions were assigned; called within `poll`."""
        self._unassigned_since = None
        self._note_places(partitions)

    def _revoke(self, consumer: Any, partitions: list[Partition]) -> None:
        """Note that the partitions were revoked; called within `poll` or `close`."""
        self._revoked, self._unassigned_since = True, time.monotonic()
        self._done = {}
        with suppress(KafkaException):
            # Otherwise those that come back would still be paused.
            consumer.resume([Partition(self._kafka.topic, number) for number in self._joined])

    def _note_places(self, partitions: Sequence[Partition]) -> None:
        """Note where the reading of the assigned partitions begins, as far as it is known."""
        self._joined = set()
        self._places = {one.partition: None for one in partitions}
        self._shared.want(self._places.keys())
        if self._places:
            with suppress(KafkaException):  # then the first record of each tells
                for one in self.client.committed(list(partitions), timeout=_COMMITTED_S):
                    if one.error is None and one.offset >= 0:
                        self._places[one.partition] = one.offset

    def _join(self) -> None:
        """Pause the partitions whose next records are shared, and read the others from Kafka."""
        for number, at in self._places.items():
            if at is None:
                continue
            place, is_shared = Partition(self._kafka.topic, number, at), self._shared.has(number, at)
            if is_shared and number not in self._joined:
                self._joined.add(number)
                self.client.pause([place])
            elif not is_shared and number in self._joined:
                self._joined.remove(number)
                self.client.resume([place])
                self.client.seek(place)

    def _log_unassigned(self) -> None:
        """Log now and then that no partition is assigned; the client does not report a missing coordinator.

        The member goes on waiting: a slow member may hold up the group for minutes.
        """
        since = self._unassigned_since
        if since is not None and time.monotonic() - since > _JOINED_WITHIN_S:
            log.warning("group_not_joined", group=self._group, again_in_s=_JOINED_WITHIN_S)
            self._unassigned_since = time.monotonic()
