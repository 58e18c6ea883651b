"""Publishers of job events over MQTT, by hand and through the library, and what an event costs by each.

By hand: paho's client alone, and HMAC over canonical JSON. Through the library: its checks of the body, its
signature, and its connection, which reports each PUBACK. Their cost is the processor time of this process per
event, in turns (hand, library, hand, library), with the broker's acknowledgements.

`job_us_per_event` is no load client: it is a whole `Job`, which keeps each event on disk and makes a connection
for each call.
"""

from __future__ import annotations

import hmac
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import orjson

from tests.benchmarks.bench_report import teller
from trunkline_agent import Job
from trunkline_agent.broker import BrokerAccess
from trunkline_agent.jobs.job import event_body, signed_event
from trunkline_agent.mqtt.mqtt_client import connect_properties, cut_connection, dial, new_client
from trunkline_agent.mqtt.mqtt_connection import MqttConnection
from trunkline_agent.wire.job_event import PROGRESS
from trunkline_agent.wire.topics import events_topic

TURNS: Final = 3
AT_MOST: Final = {"client_cpu_ratio": 1.3}
_STEPS_PER_S: Final = 50
_PUBACKS_WITHIN_S: Final = 10.0
_JOB_EVENTS: Final = 20
_JOB: Final = f"{1:08x}"
_SECRET: Final = "secret-1"
_EVENT_BYTES: Final = 1024 * 1024

say = teller("freshness")


class Publisher(Protocol):
    """One connection that publishes."""

    def publish(self, topic: str, payload: bytes) -> object:
        """Publish with QoS 1, and return at once."""

    def close(self) -> None:
        """Wait until the broker has acknowledged all, and disconnect."""


class HandWritten:
    """A publisher on paho alone: the control."""

    def __init__(self, mqtt: BrokerAccess) -> None:
        self._client = new_client(mqtt)
        self._client.max_inflight_messages_set(1000)
        self._left = 0
        self._client.on_publish = self._on_publish
        dial(self._client, mqtt, connect_properties())

    def _on_publish(self, *_: object) -> None:
        self._left -= 1

    def publish(self, topic: str, payload: bytes) -> object:
        """As `Publisher`."""
        self._left += 1
        return self._client.publish(topic, payload, qos=1)

    def close(self) -> None:
        """As `Publisher`."""
        deadline = time.monotonic() + _PUBACKS_WITHIN_S
        while self._left > 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        self._client.disconnect()
        cut_connection(self._client)


class ThroughLibrary:
    """A publisher on the library's connection."""

    def __init__(self, mqtt: BrokerAccess) -> None:
        self._connection = MqttConnection(mqtt)
        self._connection.open()
        self._last: Future[Any] | None = None

    def publish(self, topic: str, payload: bytes) -> object:
        """As `Publisher`."""
        self._last = self._connection.publish(topic, payload)
        return self._last

    def close(self) -> None:
        """As `Publisher`."""
        if self._last is not None:
            self._last.result(_PUBACKS_WITHIN_S)
        self._connection.close()


def by_hand(seq: int) -> bytes:
    """A signed event, as a program without the library makes it."""
    body = {
        "schema_version": 1,
        "seq": seq,
        "job_id": _JOB,
        "event": PROGRESS,
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "detail": _detail(seq),
        "data": _data(seq),
    }
    signature = hmac.new(_SECRET.encode(), _sorted_json(body), "sha256").hexdigest()
    return _sorted_json({**body, "data": {**_data(seq), "hmac_sig": signature}})


def through_library(seq: int) -> bytes:
    """The same event as a publisher on the library makes it."""
    body = event_body(_JOB, PROGRESS, _detail(seq), _data(seq), _SECRET)
    return signed_event({**body, "seq": seq}, _SECRET, _EVENT_BYTES)


def _detail(seq: int) -> str:
    return f"step {seq} of 12 done, reading the index"


def _data(seq: int) -> dict[str, Any]:
    return {"step": seq, "note": "all is well so far", "model": "small"}


def _sorted_json(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)


def event_cost_us(
    make: Callable[[BrokerAccess], Publisher],
    sign: Callable[[int], bytes],
    mqtt: BrokerAccess,
    count: int,
    rate: int,
) -> float:
    """Return the processor time of this process for an event, from its fields to its PUBACK, in us."""
    topic = events_topic(mqtt.topic_prefix, _JOB)
    publisher = make(mqtt)
    publisher.publish(topic, sign(1))
    time.sleep(0.2)
    began, cpu = time.monotonic(), time.process_time()
    step = max(1, rate // _STEPS_PER_S)
    for number in range(count):
        if number % step == 0:
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
        publisher.publish(topic, sign(number + 2))
    publisher.close()
    return 1e6 * (time.process_time() - cpu) / count


def job_cost_us(mqtt: BrokerAccess) -> float:
    """Return the processor time of an event that a `Job` publishes, without a receipt."""
    with tempfile.TemporaryDirectory() as state:
        job = Job(_JOB, _SECRET, mqtt=mqtt, state_dir=state)
        job.publish(PROGRESS, "the first", wait_for_receipt=False)
        cpu = time.process_time()
        for number in range(_JOB_EVENTS):
            job.publish(PROGRESS, f"step {number}", wait_for_receipt=False)
        return 1e6 * (time.process_time() - cpu) / _JOB_EVENTS


def client_cost(mqtt: BrokerAccess, seconds: float, rate: int) -> dict[str, Any]:
    """Return the cost of an event by hand and through the library, and the ratio of both."""
    count = int(rate * seconds)
    costs: dict[str, list[float]] = {"hand": [], "library": []}
    for turn in range(1, TURNS + 1):
        costs["hand"].append(event_cost_us(HandWritten, by_hand, mqtt, count, rate))
        costs["library"].append(event_cost_us(ThroughLibrary, through_library, mqtt, count, rate))
        one, other = (cost[-1] for cost in costs.values())
        say(f"turn {turn}: {one:.0f} us an event by hand, {other:.0f} us through the library")
    return {
        "control_us_per_event": round(_mean(costs["hand"])),
        "library_us_per_event": round(_mean(costs["library"])),
        "client_cpu_ratio": round(_mean(costs["library"]) / _mean(costs["hand"]), 3),
        "job_us_per_event": round(job_cost_us(mqtt)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
