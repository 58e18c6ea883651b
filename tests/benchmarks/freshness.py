"""How old an event is when it can be read: in the ledger, in the registry and mailbox views, in the live view.

Runs the whole stack, with all doors, on free ports. One generator publishes over persistent MQTT connections at
a steady rate, another posts messages over HTTP; what counts is the second half of the load, from `publish` to:
the commit of its ledger row, the first commit of `registry_jobs` that shows it (of `mailbox`, from the POST),
its arrival at a client of the gateway's event stream. `view_p95_s` is the worse of the two views.

The control takes turns with the streaming jobs, under the same load, with all other parts up: a plain Spark
copy of the topic, whose commits are measured in the same way (`control_p50_s`, `control_p95_s`). All figures
are medians of the rounds, and each start of Spark warms up before. In the end the load comes once more with
Spark stopped, for the live view's figure without it. `never_arrived` counts what no figure can hold: of the
second half, what was in none of the places.

`cores` are those of each program while the streaming jobs work, `cores_total` all of them. `us_per_event` are
the microseconds of processor time of bridge and gateway for an event, without Spark, and
`control_us_per_event` those of a bare forwarder from MQTT to Kafka and of a bare consumer, which run beside
them under the same load (`ratio_bridge_us`, `ratio_gateway_us`).

With the default options the limits count: missed ones are in `not_held`, and the exit code is 1. They are
ratios, so that a slow hour does not decide. `aims` are no limits: a usual hour should reach them.

With `--through library` it measures something else: the processor time of a publisher per event, through the
library and by hand on paho, in turns. `client_cpu_ratio` is library over control.

    ./trunkline bench freshness --through library --seconds 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from connectors.programs.local_stack import LocalStack, free_port
from connectors.programs.local_stack.part_plan import BRIDGE, GATEWAY, MOSQUITTO, STREAMS
from schemas.settings.settings import KafkaSettings, Settings, ViewSettings
from schemas.tables.ledger import LEDGER
from tests.benchmarks import bare_followers, mqtt_publishers
from tests.benchmarks.bench_report import Bench, add_phase, digits, judged, quantile, teller
from tests.benchmarks.bench_stack import beside
from tests.benchmarks.copy_stream import control_settings, copy_part
from tests.benchmarks.event_load import jobs_for
from tests.benchmarks.freshness_load import MessageSender, load
from tests.benchmarks.freshness_moments import (
    Sent,
    ages,
    ledger_moments,
    mailbox_moments,
    view_moments,
    within,
)
from tests.benchmarks.process_times import CoreMeter
from tests.faults.test_agreement import end_offsets
from tests.own_settings import stack_settings

RATE = 500
LIBRARY = "library"
FORWARDER, CONSUMER = "forwarder", "consumer"
AIMS = {"ledger_p50_s": 0.3, "ledger_p95_s": 0.5}
AT_MOST = {
    "ratio_p50": 1.6,
    "ratio_p95": 2,
    "ratio_bridge_us": 4,
    "ratio_gateway_us": 6,
    "ratio_views_p95": 2.5,
    "live_p99_ms": 50,
    "never_arrived": 0,
}
CAUGHT_UP_WITHIN_S = 600
# From the ledger's end until its last event is in every view.
SETTLE_S = 15

say = teller("freshness")


@dataclass(frozen=True)
class Turn:
    """A measured load: when each event was sent and came out of the event stream, and the cores in use.

    `window`: the moments between which an event counts.
    """

    sent: Sent
    live: Sent
    window: tuple[float, float]
    cores: dict[str, float]


class Loads:
    """The loads of one stack, each with jobs of its own."""

    def __init__(self, settings: Settings, rate: int) -> None:
        self._settings, self._rate = settings, rate
        self._first = 0

    def run(self, seconds: int) -> Turn:
        """Publish for some seconds, and return the turn, of which the second half counts."""
        meter = CoreMeter(self._settings, seconds / 2, seconds / 2)
        sent, live = load(self._settings, self._rate, seconds, self._first, meter)
        self._first += jobs_for(self._rate * seconds) + 10_000
        meter.join()
        start = min(sent.values())
        return Turn(sent, live, (start + seconds / 2, start + seconds), meter.cores)

    def turn(self, at: Settings, warm_s: int, seconds: int) -> Turn:
        """Warm up the Spark that writes the ledger of the settings `at`, and measure it."""
        self.run(warm_s)
        wait_caught_up(at)
        turn = self.run(seconds)
        wait_caught_up(at)
        time.sleep(SETTLE_S)
        return turn


def wait_caught_up(settings: Settings) -> None:
    """Wait until the ledger has as many rows as the log has records now.

    Raises:
        SystemExit: It has not within 600 seconds.
    """
    wanted, path = sum(end_offsets(settings).values()), settings.table_path(LEDGER)
    deadline = time.monotonic() + CAUGHT_UP_WITHIN_S
    while not DeltaTable.is_deltatable(path) or DeltaTable(path).count() < wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} is still behind the log")
        time.sleep(0.5)


def measure(settings: Settings, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the streaming jobs in turns with the copy, then the live view without Spark."""
    ours: list[Turn] = []
    controls: list[Turn] = []
    with LocalStack(settings) as stack:
        sender = MessageSender(settings, args.messages, "reader")
        sender.start()
        loads, copy = Loads(settings, args.rate), copy_part(settings)
        for number in range(1, args.rounds + 1):
            say(f"round {number} of {args.rounds}: the streaming jobs")
            stack[STREAMS].start()
            ours.append(loads.turn(settings, args.warm, args.seconds))
            stack[STREAMS].stop()
            say(f"round {number} of {args.rounds}: the copy")
            copy.start()
            try:
                controls.append(loads.turn(control_settings(settings), args.warm, args.seconds))
            finally:
                copy.stop()
        sender.stop.set()
        say("without Spark")
        idle = loads.run(max(10, args.seconds // 2))
        followers: dict[str, Any] = {}
        add_phase(followers, lambda: followers_figures(settings, loads, max(10, args.seconds // 2)))
    compared = compared_to_control(settings, ours, controls)
    return {**figures(settings, ours, sender.sent, idle), **compared, **followers}


def counted(turn: Turn, sent: Sent | None = None) -> Sent:
    """Return what was sent within the turn's window, of its events or of `sent`."""
    return within(turn.sent if sent is None else sent, *turn.window)


def median_of(rounds: list[list[float]], share: float) -> float:
    """Return the median of a quantile of each round."""
    return statistics.median(quantile(one, share) for one in rounds)


def figures(settings: Settings, ours: list[Turn], messages: Sent, idle: Turn) -> dict[str, Any]:
    """Return the ages in ledger, views and live view, and what never arrived."""
    ledger, places, settled = ledger_moments(settings)
    view, mailbox = view_moments(settings, places), mailbox_moments(settings)
    events, told = [counted(turn) for turn in ours], [counted(turn, messages) for turn in ours]
    accepted = [{ce_id: at for ce_id, at in one.items() if ce_id in ledger} for one in events]
    ledger_ages = [ages(one, ledger, "ledger") for one in accepted]
    view_ages, mailbox_ages = (
        [ages(one, view, "registry") for one in accepted],
        [ages(one, mailbox, "mailbox") for one in told],
    )
    live_ages = [ages(one, turn.live, "live view") for one, turn in zip(events, ours, strict=True)]
    idle_ages = [ages(counted(idle), idle.live, "live view")]
    missing = {
        "ledger": sum(len(one.keys() - settled) for one in events),
        "registry": sum(len(one.keys() - view.keys()) for one in accepted),
        "mailbox": sum(len(one.keys() - mailbox.keys()) for one in told),
        "live": sum(len(one.keys() - turn.live.keys()) for one, turn in zip(events, ours, strict=True)),
        "live_idle": len(counted(idle).keys() - idle.live.keys()),
    }
    views_p50, views_p95 = (
        max(median_of(view_ages, share), median_of(mailbox_ages, share)) for share in (0.5, 0.95)
    )
    return {
        "ledger_p50_s": round(median_of(ledger_ages, 0.5), 3),
        "ledger_p95_s": round(median_of(ledger_ages, 0.95), 3),
        "view_p50_s": round(views_p50, 3),
        "view_p95_s": round(views_p95, 3),
        "registry_p95_s": round(median_of(view_ages, 0.95), 3),
        "mailbox_p95_s": round(median_of(mailbox_ages, 0.95), 3),
        "ratio_views_p95": round(views_p95 / median_of(ledger_ages, 0.95), 3),
        "live_p50_ms": round(median_of(live_ages, 0.5) * 1000, 1),
        "live_p99_ms": round(median_of(live_ages, 0.99) * 1000, 1),
        "live_idle_p50_ms": round(median_of(idle_ages, 0.5) * 1000, 1),
        "live_idle_p99_ms": round(median_of(idle_ages, 0.99) * 1000, 1),
        "events": sum(len(turn.sent) for turn in ours),
        "messages": sum(map(len, mailbox_ages)),
        "never_arrived": sum(missing.values()),
        "never_arrived_at": missing,
    }


def compared_to_control(settings: Settings, ours: list[Turn], controls: list[Turn]) -> dict[str, Any]:
    """Return the ages in the copy's table, the ledger's in proportion to them, and the cores."""
    rounds: dict[str, list[list[float]]] = {}
    for name, at, turns in (("ours", settings, ours), ("control", control_settings(settings), controls)):
        moments, _, _ = ledger_moments(at)
        rounds[name] = [ages(counted(turn), moments, f"table of {name}") for turn in turns]
    (p50, p95), (control_p50, control_p95) = (
        [median_of(rounds[name], share) for share in (0.5, 0.95)] for name in ("ours", "control")
    )
    cores = median_cores(ours)
    return {
        "control_p50_s": round(control_p50, 3),
        "control_p95_s": round(control_p95, 3),
        "ratio_p50": round(p50 / control_p50, 3),
        "ratio_p95": round(p95 / control_p95, 3),
        "rounds": [
            {
                name: [round(quantile(one, share), 3) for share in (0.5, 0.95)]
                for name, one in (("ledger_s", mine), ("control_s", other))
            }
            for mine, other in zip(rounds["ours"], rounds["control"], strict=True)
        ],
        "cores": cores,
        "cores_total": round(sum(cores.values()), 2),
        "control_cores_total": round(sum(median_cores(controls).values()), 2),
    }


def median_cores(turns: list[Turn]) -> dict[str, float]:
    """Return the medians of the cores, by program."""
    names = sorted({name for turn in turns for name in turn.cores})
    return {name: round(statistics.median(turn.cores.get(name, 0.0) for turn in turns), 3) for name in names}


def followers_figures(settings: Settings, loads: Loads, seconds: int) -> dict[str, Any]:
    """Return what an event costs bridge and gateway, beside a bare forwarder and a bare consumer."""
    with (
        beside(settings, FORWARDER, bare_followers.__name__, FORWARDER),
        beside(settings, CONSUMER, bare_followers.__name__, CONSUMER),
    ):
        turn = loads.run(seconds)
    per_s = len(counted(turn)) / (turn.window[1] - turn.window[0])
    us = {name: digits(1e6 * cores / per_s) for name, cores in turn.cores.items()}
    return {
        "us_per_event": {name: us[name] for name in (BRIDGE, GATEWAY)},
        "control_us_per_event": {name: us[name] for name in (FORWARDER, CONSUMER)},
        "ratio_bridge_us": digits(us[BRIDGE] / us[FORWARDER]),
        "ratio_gateway_us": digits(us[GATEWAY] / us[CONSUMER]),
    }


def settings_in(folder: Path, partitions: int | None) -> Settings:
    """Return settings of a stack with all doors. `partitions`: those of the topic, if not the default."""
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    if partitions:
        kafka = kafka.model_copy(update={"partitions": partitions})
    # Compaction would take away the files that tell when a row was first readable.
    return stack_settings(folder, kafka=kafka, views=ViewSettings(maintenance_interval_s=0))


def measure_publisher(settings: Settings, args: argparse.Namespace) -> dict[str, Any]:
    """The broker alone: the cost of a publisher through the library beside that of the control."""
    with LocalStack(settings, parts=(MOSQUITTO,)):
        found = mqtt_publishers.client_cost(role_mqtt(settings, OPERATOR), args.seconds, args.rate)
    # In turns, so the limit counts with any options.
    return {**found, **judged(found, mqtt_publishers.AT_MOST)}


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure what the options ask for."""
    if args.through == LIBRARY:
        return measure_publisher(stack_settings(work / "data"), args)
    return {**measure(settings_in(work / "data", args.partitions), args), "aims": AIMS}


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("freshness", __doc__, AT_MOST)
    bench.add_argument("--rate", type=int, default=RATE, help=f"events a second (default {RATE})")
    bench.add_argument("--seconds", type=int, default=40, help="length of the measured load (default 40)")
    bench.add_argument("--warm", type=int, default=240, help="length of the load before it (default 240)")
    bench.add_argument("--messages", type=int, default=20, help="messages a second (default 20)")
    bench.add_argument("--partitions", type=int, default=None, help="partitions of the topic")
    bench.add_argument("--rounds", type=int, default=2, help="turns of jobs and copy (default 2)")
    through = "measure instead what a publisher through the library costs beside the control"
    bench.add_argument("--through", choices=[LIBRARY], help=through)
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
