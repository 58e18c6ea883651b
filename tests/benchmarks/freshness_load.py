"""The load of `bench freshness`: events over MQTT, messages over HTTP, and a client of the event stream."""

from __future__ import annotations

import sys
import threading
import time

import httpx
import orjson

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord
from tests.benchmarks.event_load import events, fill, jobs_for, registrations
from tests.benchmarks.freshness_moments import Sent
from tests.benchmarks.mqtt_publishers import ThroughLibrary
from tests.benchmarks.process_times import CoreMeter
from trunkline_agent import Agent, Credentials, HubAccess
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.topics import events_topic

CONNECTIONS = 4
RECIPIENTS = 20
STEPS_PER_S = 50
SETTLED_WITHIN_S = 60


class MessageSender(threading.Thread):
    """Posts `rate` messages a second to some recipients until `stop`. `sent`: id to the moment before its POST
    (seconds since 1970), of those that were answered.
    """

    def __init__(self, settings: Settings, rate: int, label: str) -> None:
        super().__init__(daemon=True)
        self._rate, self._url = rate, settings.gateway_url
        self._token = settings.operator_token_file.read_text().strip()
        self._names = [f"{label}{number}" for number in range(RECIPIENTS)]
        self.sent: dict[str, float] = {}
        self.stop = threading.Event()
        with GatewayClient(settings) as gateway:
            for name in self._names:
                gateway.post(path_of("principals"), {"principal": name, "role": "worker"})

    def run(self) -> None:
        """Post until `stop` is set."""
        began = time.monotonic()
        with Agent(None, Credentials("", hub=HubAccess(self._url, self._token)), patience_s=0) as agent:
            number = 0
            while not self.stop.wait(max(0.0, began + number / self._rate - time.monotonic())):
                payload = {"text": "step 7 of 12 done, reading the index", "n": number}
                moment = time.time()
                try:
                    sent = agent.send(self._names[number % RECIPIENTS], "note", payload)
                except TrunklineError as error:
                    print(f"messages: the load ended: {error}", file=sys.stderr)
                    return
                self.sent[str(sent.message_id)] = moment
                number += 1


class EventListener(threading.Thread):
    """A client of the gateway's event stream that notes when each event arrived."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(daemon=True)
        self._settings = settings
        self.arrived: Sent = {}
        self.connected = threading.Event()
        self.stop = threading.Event()

    def run(self) -> None:
        """Read until `stop` is set, or the connection ends."""
        token = self._settings.operator_token_file.read_text().strip()
        where = f"{self._settings.gateway_url}/api/hub/events?type=job.event"
        headers = {"Authorization": f"Bearer {token}"}
        try:
            with httpx.stream("GET", where, headers=headers, timeout=httpx.Timeout(10, read=600)) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    self.connected.set()
                    if self.stop.is_set():
                        return
                    if line.startswith("data:"):
                        now = time.time()
                        told = orjson.loads(line[5:])
                        if "ce_id" in told:
                            self.arrived.setdefault(told["ce_id"], now)
        except httpx.HTTPError as error:
            print(f"freshness: the event stream ended: {error}", file=sys.stderr)


def publish_steadily(settings: Settings, records: list[OutgoingRecord], rate: int) -> Sent:
    """Publish the records at `rate` a second over a few connections; when each went out first."""
    mqtt = role_mqtt(settings, OPERATOR)
    publishers = [ThroughLibrary(mqtt) for _ in range(CONNECTIONS)]
    topics = {r.stream: events_topic(mqtt.topic_prefix, r.stream.removeprefix("job/")) for r in records}
    sent: Sent = {}
    began = time.monotonic()
    step = max(1, rate // STEPS_PER_S)
    for number, record in enumerate(records):
        if number % step == 0:
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
        # A job's events take one connection, so that they stay in order.
        publisher = publishers[hash(record.stream) % CONNECTIONS]
        sent.setdefault(record.ce_id, time.time())
        publisher.publish(topics[record.stream], record.value)
    late_s = time.monotonic() - began - len(records) / rate
    if late_s > 1:
        print(f"freshness: the generator was {late_s:.1f} s behind its rate", file=sys.stderr)
    for publisher in publishers:
        publisher.close()
    return sent


def load(
    settings: Settings, rate: int, seconds: int, first: int, meter: CoreMeter | None = None
) -> tuple[Sent, Sent]:
    """Register jobs, publish their events; when each was sent and arrived at the event stream's client.

    `meter` is started with the first event, if there is one.
    """
    count = rate * seconds
    fill(settings, registrations(jobs_for(count), load_keyring(settings), first))
    time.sleep(5)  # the accounts and views of the new jobs are not what is measured
    records = list(events(count, seed=2, first=first))
    listener = EventListener(settings)
    listener.start()
    if not listener.connected.wait(20):
        raise SystemExit("freshness: the event stream did not open")
    if meter is not None:
        meter.start()
    sent = publish_steadily(settings, records, rate)
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while len(listener.arrived) < len(sent) and time.monotonic() < deadline:
        time.sleep(0.2)
    listener.stop.set()
    return sent, listener.arrived
