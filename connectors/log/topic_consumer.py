"""A consumer of the one topic by librdkafka, which fetches outside the interpreter (decision 0023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import Consumer
from confluent_kafka import KafkaError as ClientError

from schemas.errors import BackboneUnreachable
from schemas.log_access.event_topic import reach_kafka
from schemas.log_access.kafka_clients import SILENT, librdkafka_options, librdkafka_unreachable
from schemas.settings.settings import KafkaSettings

# The client recovers from all other errors by itself.
_UNREACHABLE: Final = (
    ClientError._ALL_BROKERS_DOWN,
    ClientError._AUTHENTICATION,
    ClientError.TOPIC_AUTHORIZATION_FAILED,
    ClientError.UNKNOWN_TOPIC_OR_PART,
)


class TopicConsumer:
    """A consumer for one thread. `options`: librdkafka's, beside those of every consumer.

    librdkafka's CONFIGURATION.md explains the options.

    Raises:
        BackboneUnreachable: No bootstrap server accepts a connection.
    """

    def __init__(self, kafka: KafkaSettings, options: Mapping[str, Any]) -> None:
        reach_kafka(kafka)
        self._kafka = kafka
        self._error: ClientError | None = None
        self.client: Any = Consumer({**_options(kafka), **options, "error_cb": self._on_error})

    def messages(self, timeout_s: float, most: int) -> list[Any]:
        """Return at most `most` messages; none if none arrives within `timeout_s` seconds.

        Errors of single partitions are among the messages.

        Raises:
            BackboneUnreachable: Kafka is unreachable or refuses us.
        """
        first = self.client.poll(timeout_s)
        if self._error is not None:
            raise librdkafka_unreachable(self._kafka, self._error, "")
        return [] if first is None else [first, *self.client.consume(most - 1, 0)]

    def trouble(self, error: ClientError) -> BackboneUnreachable:
        """Return the exception for an error of the client with this topic."""
        return librdkafka_unreachable(self._kafka, error, f", topic {self._kafka.topic!r}")

    def close(self) -> None:
        """Close the client; a member of a group leaves it."""
        self.client.close()

    def _on_error(self, error: ClientError) -> None:
        """Keep the first error of the client; called within `poll`.

        The last error of several only says that all brokers are down.
        """
        if self._error is None and (error.fatal() or error.code() in _UNREACHABLE):
            self._error = error


def client_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Return the options that all our clients of librdkafka share (see librdkafka's CONFIGURATION.md)."""
    return {
        **librdkafka_options(kafka),
        "reconnect.backoff.max.ms": 1000,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        # The client reports to `error_cb`; otherwise it would write to stderr.
        "logger": SILENT,
    }


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
