"""Reads the one topic with librdkafka, which fetches outside the interpreter (decision 0023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import Consumer
from confluent_kafka import KafkaError as ClientError

from schemas.errors import BackboneUnreachable
from schemas.log_access.event_topic import reach_kafka
from schemas.log_access.kafka_clients import SILENT, librdkafka_options, librdkafka_unreachable
from schemas.settings.settings import KafkaSettings

# Of all other troubles the client takes care by itself.
_AWAY: Final = (
    ClientError._ALL_BROKERS_DOWN,
    ClientError._AUTHENTICATION,
    ClientError.TOPIC_AUTHORIZATION_FAILED,
    ClientError.UNKNOWN_TOPIC_OR_PART,
)


class TopicConsumer:
    """A client that waits for what comes; for one thread. `options` are librdkafka's, beside those that all
    have (its CONFIGURATION.md has the names).

    Raises BackboneUnreachable where no bootstrap server takes a connection.
    """

    def __init__(self, kafka: KafkaSettings, options: Mapping[str, Any]) -> None:
        reach_kafka(kafka)
        self._kafka = kafka
        self._away: ClientError | None = None
        self.client: Any = Consumer({**_options(kafka), **options, "error_cb": self._hear})

    def messages(self, timeout_s: float, most: int) -> list[Any]:
        """What has come since, at most `most`, errors of single partitions among them; empty when nothing came
        within `timeout_s` seconds.

        Raises BackboneUnreachable while Kafka is away or refuses us.
        """
        first = self.client.poll(timeout_s)
        if self._away is not None:
            raise librdkafka_unreachable(self._kafka, self._away, "")
        return [] if first is None else [first, *self.client.consume(most - 1, 0)]

    def trouble(self, error: ClientError) -> BackboneUnreachable:
        """What the client could not do with the topic, as the error to raise."""
        return librdkafka_unreachable(self._kafka, error, f", topic {self._kafka.topic!r}")

    def close(self) -> None:
        """End the client; a member of a group leaves it."""
        self.client.close()

    def _hear(self, error: ClientError) -> None:
        """The client tells of a trouble, within `poll`. That all are away is said last, and says least."""
        if self._away is None and (error.fatal() or error.code() in _AWAY):
            self._away = error


def _options(kafka: KafkaSettings) -> dict[str, Any]:
    return {
        **librdkafka_options(kafka),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # As Spark reads: what one of them sees, the other must.
        "isolation.level": "read_uncommitted",
        "fetch.message.max.bytes": max(1024 * 1024, kafka.record_limit_bytes),
        "queued.max.messages.kbytes": max(16 * 1024, 4 * kafka.record_limit_bytes // 1024),
        # With more than `queued.min.messages` waiting for us it pauses, for a second if nothing is said.
        "fetch.queue.backoff.ms": 10,
        "socket.timeout.ms": 10_000,
        "reconnect.backoff.max.ms": 1000,
        # How long a topic may be unknown before that is said.
        "topic.metadata.propagation.max.ms": 2000,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        # What it has to say comes to `error_cb`; else it would write to stderr.
        "logger": SILENT,
    }
