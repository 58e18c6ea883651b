"""The options of the librdkafka clients; CONFIGURATION.md of librdkafka explains them."""

from __future__ import annotations

from typing import Any, Final

from schemas.log_access.kafka_clients import SILENT, librdkafka_options
from schemas.settings.settings import KafkaSettings

OUTSTANDING_LIMIT_BYTES: Final = 64 * 1024 * 1024
BATCH_BYTES: Final = 16 * 1024
"""A longer record travels alone. The broker refuses whole batches, so it is known which one was refused."""
# The broker counts the head of a batch in addition to the record.
_BATCH_HEAD_BYTES: Final = 64


def client_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Return the options that all librdkafka clients of this project share: addresses, login and behaviour.

    CONFIGURATION.md of librdkafka explains the options.
    """
    return {
        **librdkafka_options(kafka),
        "reconnect.backoff.max.ms": 1000,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        # The client reports to `error_cb`; otherwise it would write to stderr.
        "logger": SILENT,
    }


def producer_options(kafka: KafkaSettings, *, linger_ms: int) -> dict[str, Any]:
    """Return the options of a librdkafka producer, which librdkafka's CONFIGURATION.md explains.

    A record waits `linger_ms` for others, and those that arrive during a request are sent with the next one.
    """
    delivery_ms = int(kafka.delivery_timeout_s * 1000)
    return {
        **client_options(kafka),
        "client.id": "trunkline-publisher",
        "enable.idempotence": True,
        # A failed record stops the producer, so no later record overtakes it. librdkafka's own time-out does
        # not guarantee that. So `_serve` watches the deadlines and fails all waiting records.
        "enable.gapless.guarantee": True,
        "message.timeout.ms": 0,
        "acks": "all",
        "linger.ms": linger_ms,
        # A broker that knows nothing of a producer takes any of its sequence numbers as the first. So if it
        # is not ready for a first request, a second one at the same time may overtake that (decision 0035).
        "max.in.flight.requests.per.connection": 1,
        "request.timeout.ms": max(100, min(delivery_ms // 2, 10_000)),
        "socket.timeout.ms": 10_000,
        "message.max.bytes": kafka.record_limit_bytes - _BATCH_HEAD_BYTES,
        "batch.size": BATCH_BYTES,
        # The publisher limits the waiting bytes itself; the client's limits only have to be higher.
        "queue.buffering.max.messages": 0,
        "queue.buffering.max.kbytes": 4 * OUTSTANDING_LIMIT_BYTES // 1024,
    }
