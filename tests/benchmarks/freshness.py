"""How old an event is when it can be read: in the ledger, in the registry and mailbox views, in the live view.

Runs the whole stack, with all doors, on free ports. One generator publishes over persistent MQTT connections at
a steady rate, another posts messages over HTTP; what counts is the second half of the load, from `publish` to:
the commit of its ledger row, the first commit of `registry_jobs` that shows it (of `mailbox`, from the POST),
its arrival at a client of the gateway's event stream. `view_p95_s` is the worse of the two views. Then the same
load once more with Spark stopped, for the live view's figure without it. `never_arrived` counts what no figure
can hold: of the second half, what was in none of the places. At the default rate the limits count: those that
were passed are in `not_held`, and the exit code is 1.

    ./trunkline bench freshness --rate 500 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pyarrow.parquet as parquet

from connectors.local_stack import LocalStack, free_port
from connectors.local_stack.part_plan import STREAMS
from connectors.mqtt_link.mqtt_connection import connect_properties, cut_connection, dial, new_client
from connectors.mqtt_link.mqtt_credentials import OPERATOR, role_mqtt
from connectors.mqtt_link.topics import events_topic
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import KafkaSettings, Settings, ViewSettings
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.mailboxes.message import MAILBOX_VIEW
from schemas.tables.ledger import LEDGER
from schemas.wire.record import OutgoingRecord
from tests.benchmarks.bench_report import Bench, quantile
from tests.benchmarks.event_load import events, fill, jobs_for, registrations
from tests.benchmarks.message_load import MessageSender
from tests.own_settings import stack_settings

RATE = 500
AT_MOST = {"ledger_p50_s": 0.5, "ledger_p95_s": 0.9, "view_p95_s": 2.5, "live_p99_ms": 50, "never_arrived": 0}
CONNECTIONS = 4
STEPS_PER_S = 50
SETTLED_WITHIN_S = 60
Sent = dict[str, float]
"""CloudEvents id to the moment of its first publish (seconds since 1970)."""


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
    clients = [new_client(mqtt) for _ in range(CONNECTIONS)]
    for client in clients:
        client.max_inflight_messages_set(1000)
        dial(client, mqtt, connect_properties())
    topics = {r.stream: events_topic(mqtt.topic_prefix, r.stream.removeprefix("job/")) for r in records}
    sent: Sent = {}
    began = time.monotonic()
    step = max(1, rate // STEPS_PER_S)
    for number, record in enumerate(records):
        if number % step == 0:
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
        # A job's events take one connection, so that they stay in order.
        client = clients[hash(record.stream) % CONNECTIONS]
        sent.setdefault(record.ce_id, time.time())
        client.publish(topics[record.stream], record.value, qos=1)
    late_s = time.monotonic() - began - len(records) / rate
    if late_s > 1:
        print(f"freshness: the generator was {late_s:.1f} s behind its rate", file=sys.stderr)
    time.sleep(2)
    for client in clients:
        client.disconnect()
        cut_connection(client)
    return sent


def commits(table: str) -> Iterator[tuple[float, list[Path]]]:
    """Moment and added files of each commit of a local table, oldest first."""
    for log in sorted(Path(table, "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        added = [a["add"]["path"] for a in actions if "add" in a and a["add"]["dataChange"]]
        yield log.stat().st_mtime, [Path(table, path) for path in added if Path(table, path).exists()]


def ledger_moments(settings: Settings) -> tuple[Sent, dict[str, tuple[str, int]], set[str]]:
    """When each accepted event was readable in the ledger, and its job and offset; and all events, however they
    were settled.
    """
    moments: Sent = {}
    settled: set[str] = set()
    places: dict[str, tuple[str, int]] = {}
    columns = ["ce_id", "stream_id", "offset", "type", "verdict"]
    for moment, files in commits(settings.table_path(LEDGER)):
        for file in files:
            for row in parquet.read_table(file, columns=columns, partitioning=None).to_pylist():
                if row["type"] != "job.event":
                    continue
                settled.add(row["ce_id"])
                if row["verdict"] == "accepted":
                    moments[row["ce_id"]] = moment
                    places[row["ce_id"]] = (row["stream_id"], row["offset"])
    return moments, places, settled


def view_moments(settings: Settings, places: dict[str, tuple[str, int]]) -> Sent:
    """When the registry's row of its job first showed each event."""
    shown: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for moment, files in commits(settings.table_path(REGISTRY_JOBS)):
        for file in files:
            rows = parquet.read_table(file, columns=["job_id", "last_offset"], partitioning=None)
            for row in rows.to_pylist():
                shown[row["job_id"]].append((moment, row["last_offset"]))
    found: Sent = {}
    for ce_id, (job_id, offset) in places.items():
        moments = [moment for moment, last in shown[job_id] if last >= offset]
        if moments:
            found[ce_id] = min(moments)
    return found


def mailbox_moments(settings: Settings) -> Sent:
    """When the mailbox first showed each message."""
    found: Sent = {}
    for moment, files in commits(settings.table_path(MAILBOX_VIEW)):
        for file in files:
            for message_id in parquet.read_table(file, columns=["message_id"], partitioning=None)["message_id"]:
                found.setdefault(message_id.as_py(), moment)
    return found


def within(sent: Sent, after: float, until: float) -> Sent:
    """Return the events that were sent from `after` to `until`."""
    return {ce_id: moment for ce_id, moment in sent.items() if after <= moment <= until}


def ages(sent: Sent, seen: Sent) -> list[float]:
    """Seconds from publish to `seen`, sorted; raises if there is nothing."""
    found = sorted(seen[ce_id] - moment for ce_id, moment in sent.items() if ce_id in seen)
    if not found:
        raise SystemExit("freshness: nothing arrived")
    return found


def load(settings: Settings, rate: int, seconds: int, first: int) -> tuple[Sent, Sent]:
    """Register jobs, publish their events; when each was sent and arrived at the event stream's client."""
    count = rate * seconds
    kafka = settings.kafka
    fill(kafka, registrations(jobs_for(count), load_keyring(settings), first))
    time.sleep(5)  # the accounts and views of the new jobs are not what is measured
    records = list(events(count, seed=2, first=first))
    listener = EventListener(settings)
    listener.start()
    if not listener.connected.wait(20):
        raise SystemExit("freshness: the event stream did not open")
    sent = publish_steadily(settings, records, rate)
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while len(listener.arrived) < len(sent) and time.monotonic() < deadline:
        time.sleep(0.2)
    listener.stop.set()
    return sent, listener.arrived


def measure(settings: Settings, rate: int, seconds: int, warm_s: int, messages: int) -> dict[str, Any]:
    """With Spark busy, then without Spark."""
    with LocalStack(settings) as stack:
        sender = MessageSender(settings, messages, "reader")
        sender.start()
        # A first load warms Spark's JVM: after a minute its compilers still take a tenth to a third of a core.
        load(settings, rate, warm_s, first=0)
        second = jobs_for(rate * warm_s) + 10_000
        sent, live = load(settings, rate, seconds, first=second)
        sender.stop.set()
        time.sleep(15)
        stack[STREAMS].stop()
        idle_sent, idle_live = load(settings, rate, max(10, seconds // 2), first=second + 100_000)
    idle_s = max(10, seconds // 2)
    ledger, places, settled = ledger_moments(settings)
    view, mailbox = view_moments(settings, places), mailbox_moments(settings)
    start, idle_start = min(sent.values()), min(idle_sent.values())
    # The idle wait after the load is no part of it: messages go on meanwhile.
    window = (start + seconds / 2, start + seconds)
    events_sent, told = within(sent, *window), within(sender.sent, *window)
    idle = within(idle_sent, idle_start + idle_s / 2, idle_start + idle_s)
    accepted = {ce_id: moment for ce_id, moment in events_sent.items() if ce_id in ledger}
    ledger_ages, view_ages = ages(accepted, ledger), ages(accepted, view)
    live_ages, idle_ages = ages(events_sent, live), ages(idle, idle_live)
    mailbox_ages = ages(told, mailbox)
    missing = {
        "ledger": len(events_sent.keys() - settled),
        "registry": len(accepted.keys() - view.keys()),
        "mailbox": len(told.keys() - mailbox.keys()),
        "live": len(events_sent.keys() - live.keys()),
        "live_idle": len(idle.keys() - idle_live.keys()),
    }
    return {
        "ledger_p50_s": round(quantile(ledger_ages, 0.5), 3),
        "ledger_p95_s": round(quantile(ledger_ages, 0.95), 3),
        "view_p50_s": round(max(quantile(view_ages, 0.5), quantile(mailbox_ages, 0.5)), 3),
        "view_p95_s": round(max(quantile(view_ages, 0.95), quantile(mailbox_ages, 0.95)), 3),
        "registry_p95_s": round(quantile(view_ages, 0.95), 3),
        "mailbox_p95_s": round(quantile(mailbox_ages, 0.95), 3),
        "live_p50_ms": round(quantile(live_ages, 0.5) * 1000, 1),
        "live_p99_ms": round(quantile(live_ages, 0.99) * 1000, 1),
        "live_idle_p50_ms": round(quantile(idle_ages, 0.5) * 1000, 1),
        "live_idle_p99_ms": round(quantile(idle_ages, 0.99) * 1000, 1),
        "events": len(sent),
        "messages": len(mailbox_ages),
        "never_arrived": sum(missing.values()),
        "never_arrived_at": missing,
    }


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure on a stack with all doors."""
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    if args.partitions:
        kafka = kafka.model_copy(update={"partitions": args.partitions})
    # Compaction would take away the files that tell when a row was first readable.
    settings = stack_settings(work / "data", kafka=kafka, views=ViewSettings(maintenance_interval_s=0))
    return measure(settings, args.rate, args.seconds, args.warm, args.messages)


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("freshness", __doc__, AT_MOST)
    bench.add_argument("--rate", type=int, default=RATE, help=f"events a second (default {RATE})")
    bench.add_argument("--seconds", type=int, default=40, help="length of the measured load (default 40)")
    bench.add_argument("--warm", type=int, default=240, help="length of the load before it (default 240)")
    bench.add_argument("--messages", type=int, default=20, help="messages a second (default 20)")
    bench.add_argument("--partitions", type=int, default=None, help="partitions of the topic")
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
