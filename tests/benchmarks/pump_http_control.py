"""The control of `bench pump` with HTTP: it answers 202 when Kafka has all records of a message.

One asyncio protocol reads the requests. For each it appends as many records of the same sizes as gateway and
pump do for a message, one after the other, and each begins when Kafka has acknowledged the one before. It
checks nothing. Its arguments are its port, and the records of a message as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer

from connectors.log.kafka_libraries import producer_options
from connectors.programs.local_stack.program_plans import READY_FILE
from schemas.settings.settings import KafkaSettings, load_settings
from tests.benchmarks.lean_http import complete_request
from tests.benchmarks.pump_log import LINGER_MS, RecordShare, make_topic, sizes_of_next
from tests.broker_processes import LOOPBACK

_ACCEPTED: Final = b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"


class Chains:
    """Appends the records of messages. The producer's callbacks append the next ones, on its own thread."""

    def __init__(self, kafka: KafkaSettings, shares: list[RecordShare]) -> None:
        self._topic, self._partitions, self._shares = (
            f"control.{uuid.uuid4().hex[:8]}",
            kafka.partitions,
            shares,
        )
        make_topic(kafka, self._topic)
        self._producer = Producer(producer_options(kafka, linger_ms=LINGER_MS))
        self._owed: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._poll, daemon=True).start()

    def _poll(self) -> None:
        while True:
            self._producer.poll(0.1)

    def begin(self, transport: asyncio.Transport) -> None:
        """Append the records of one message, then answer."""
        self._append(sizes_of_next(self._shares, self._owed), transport)

    def _append(self, sizes: list[int], transport: asyncio.Transport) -> None:
        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                self._loop.call_soon_threadsafe(transport.abort)
            elif sizes:
                self._append(sizes, transport)
            else:
                self._loop.call_soon_threadsafe(transport.write, _ACCEPTED)

        partition = next(self._numbers) % self._partitions
        self._producer.produce(self._topic, bytes(sizes.pop(0)), partition=partition, on_delivery=delivered)


class Front(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, chains: Chains) -> None:
        self._chains, self._received = chains, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. asyncio calls it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Begin a message when its request is complete. asyncio calls it."""
        self._received += data
        if complete_request(self._received):
            self._received.clear()
            self._chains.begin(self._transport)


async def serve(port: int, shares: list[RecordShare]) -> None:
    """Serve until the process ends."""
    chains = Chains(load_settings().kafka, shares)
    server = await asyncio.get_running_loop().create_server(lambda: Front(chains), LOOPBACK, port)
    Path(os.environ[READY_FILE]).touch()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), [RecordShare(*one) for one in json.loads(sys.argv[2])]))
