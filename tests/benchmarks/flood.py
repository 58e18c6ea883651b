"""Measure what a principal that floods by one door costs the others, at each door in turn.

Starts the whole stack on free ports. Four principals that behave measure their own round trips: over HTTP
(send, lease, acknowledge), over MQTT, over MCP, and from the file queue. Another principal floods by one door
after the other: `http` (send), `mqtt` (an agent's outbox), `mcp` (send_to_agent), `file` (lines of the file
queue), `xml` (POST /messages) and `jobs` (events of a job over MQTT). At each door there are rounds of three
turns:

- calm: no principal floods.
- flood: a process floods at its full speed. Its limit is 600 messages a minute (`--per-minute`), or it has the
  default limits alone (`--unlimited`).
- control: a process uses as much processor time as the flooder did, and sends nothing. The flooder shares the
  machine with the stack, and the control shows what this alone costs. Both lead sessions of their own, as the
  parts of the stack do, because Linux shares the processor among sessions (sched(7), autogroup).

`worst_control_ratio` is the p99 of the principal that suffered most, in the flood's turns divided by that in
the control's turns; `worst_ratio` divides by that in the calm ones. The limit is on the former, because the
latter has the flooder's own processor time in it. `memory_share` is the gateway's memory after the flood,
divided by 1.2 times that before it and 4 kB for each record that was added meanwhile. `refusal_share` is the
number of rows of refusals that the flood left in the ledger, divided by what the bounded rate of refusals
allows. `healthz_delay_ms` is the p99 of GET /healthz in the flood's turns minus that in the control's. Limits
that were not held are in `not_held`, and the exit code is 1.

    ./trunkline bench flood --json
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import orjson

from connectors.log.ledger_files.ledger_reader import LedgerReader
from connectors.programs.local_stack import LocalStack
from schemas.settings.settings import Settings
from schemas.streams.refused.refusal import REQUEST_REFUSED
from tests.benchmarks.bench_report import Bench, quantile, teller
from tests.benchmarks.bench_stack import operator_client
from tests.benchmarks.calm_clients import CalmClients, Window
from tests.benchmarks.flooders import BURN, TURNS, Flooded, Flooder, Order, flooding
from tests.benchmarks.stack_figures import memory_mb
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.own_settings import stack_settings
from trunkline_agent.mcp.signing import new_key_pair
from trunkline_agent.wire.verdicts import REJECTED

DOORS: Final = tuple(name for name in TURNS if name != BURN)
AT_MOST: Final = {
    "worst_control_ratio": 2.0,
    "worst_memory_share": 1.0,
    "worst_refusal_share": 1.0,
    "worst_healthz_delay_ms": 100.0,
}
WARM_S: Final = 8.0
RECOVERY_S: Final = 60.0
END_S: Final = 120.0
LEDGER_S: Final = 60.0
RECORD_BYTES: Final = 4000
# As `connectors.hub.serving.answers`: records of one principal, route and reason at once, and then in 10 s.
REFUSALS_AT_ONCE, REFUSAL_EVERY_S, REASONS = 5, 10.0, 3

say = teller("flood")


@dataclass
class Door:
    """The measurements at one door."""

    order: Order
    calm: Window = field(default_factory=Window)
    flood: Window = field(default_factory=Window)
    control: Window = field(default_factory=Window)
    turns: list[Flooded] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    before_mb: dict[str, float] = field(default_factory=dict)
    after_mb: dict[str, float] = field(default_factory=dict)
    began_at: float = 0.0
    ended_at: float = 0.0


def order_of(door: str, settings: Settings, operator: httpx.Client, per_minute: int | None) -> Order:
    """Make the principal that floods by a door, its limit and the mailbox that it floods."""
    name, sink = f"flood_{door}", f"sink_{door}"
    add_principal(operator, sink, "worker")
    secret = prefix = ""
    if door in ("http", "xml"):
        secret = add_principal(operator, name, "worker")
    elif door == "mqtt":
        told = operator.post(f"/api/hub/agents/{name}/mqtt", json={}).raise_for_status().json()
        secret, prefix = told["secret"], told["prefix"]
    elif door == "mcp":
        private, public = new_key_pair()
        body = {"agent_name": name, "public_key": public, "task": "floods"}
        operator.post("/api/hub/participants", json=body).raise_for_status()
        secret = private.decode()
    elif door == "jobs":
        told = operator.post("/api/hub/jobs", json={"description": "floods"}).raise_for_status().json()
        name, secret = told["job_id"], told["secret"]
    if per_minute is not None:
        limits = {"messages_per_minute": per_minute}
        operator.post(f"/api/hub/limits/name/{name}", json=limits).raise_for_status()
    return Order(door, settings, name, secret, sink, prefix)


def recovered_after(clients: CalmClients, calm: Window) -> float:
    """Wait until all principals have a usual round trip again; return the seconds, at most RECOVERY_S."""
    usual = {name: 2 * quantile(values, 0.9) for name, values in calm.took_ms.items() if values}
    clients.last_ms.clear()
    began = time.monotonic()
    while (passed := time.monotonic() - began) < RECOVERY_S:
        if all(clients.last_ms.get(name, math.inf) <= most for name, most in usual.items()):
            return passed
        time.sleep(0.05)
    return RECOVERY_S


def one_round(found: Door, clients: CalmClients, flooder: Flooder, seconds: float, niceness: int) -> None:
    """Make the three turns."""
    clients.window = found.calm
    time.sleep(seconds)
    clients.window = found.flood
    say(f"{found.order.door} floods")
    flooder.begin(seconds)
    time.sleep(seconds)
    clients.window = None
    turn = flooder.result(END_S)
    found.turns.append(turn)
    found.recovery_s.append(recovered_after(clients, found.calm))
    share = min(1.0, turn.cpu_s / turn.seconds)
    with flooding(Order(BURN, found.order.settings, BURN, str(share)), niceness) as burner:
        clients.window = found.control
        burner.begin(seconds)
        time.sleep(seconds)
        clients.window = None
        burner.result(END_S)


def p99_ratio(above: Window, below: Window) -> dict[str, float]:
    """Return the p99 of each principal in one window, divided by that in the other."""
    return {
        name: round(quantile(values, 0.99) / quantile(below.took_ms[name], 0.99), 2)
        for name, values in sorted(above.took_ms.items())
        if values and below.took_ms.get(name)
    }


def trips(window: Window) -> dict[str, Any]:
    """Return number, p50 and p99 of the round trips of each principal."""
    return {
        name: {
            "trips": len(values),
            "p50_ms": round(quantile(values, 0.5), 1),
            "p99_ms": round(quantile(values, 0.99), 1),
        }
        for name, values in sorted(window.took_ms.items())
        if values
    }


def is_of(row: Mapping[str, Any], order: Order) -> bool:
    """Return whether a row of the ledger is of this flood: by its principal, its stream or its mailbox."""
    mailboxes = {f"default/{order.name}", f"default/{order.sink}"}
    return (
        order.name in (row["principal"], row["stream_id"])
        or row["stream_id"] in mailboxes
        or (row["type"] == REQUEST_REFUSED and _refused_principal(row) == order.name)
    )


def _refused_principal(row: Mapping[str, Any]) -> Any:
    try:
        return orjson.loads(row["value"] or b"{}").get("principal")
    except orjson.JSONDecodeError:
        return None


def rows_of(rows: Iterable[Mapping[str, Any]], order: Order) -> Counter[str]:
    """Count the rows of a flood, by type, verdict and reason."""
    found: Counter[str] = Counter()
    for row in rows:
        if is_of(row, order):
            found[" ".join(filter(None, (row["type"], row["verdict"], row["reason"])))] += 1
    return found


def refusals_in(counts: Mapping[str, int]) -> int:
    """Return the number of rows that are about something refused."""
    return sum(
        count for name, count in counts.items() if name.startswith(REQUEST_REFUSED) or f" {REJECTED}" in name
    )


def logged_during(rows: Iterable[Mapping[str, Any]], found: Door) -> int:
    """Count the rows that Kafka got in the time of a door's turns."""
    return sum(found.began_at <= row["logged_at"].timestamp() <= found.ended_at for row in rows)


def figures(found: Door, counts: Mapping[str, int], records: int) -> dict[str, Any]:
    """Return the figures of a door.

    `counts` are the rows of the flood in the ledger, `records` all rows of the time of its turns.
    """
    refusals, lasted_s = refusals_in(counts), found.ended_at - found.began_at
    allowed_mb = 1.2 * found.before_mb["gateway"] + records * RECORD_BYTES / 1e6
    allowed_rows = REASONS * (REFUSALS_AT_ONCE + 1 + lasted_s / REFUSAL_EVERY_S)
    calm_ratio, control_ratio = p99_ratio(found.flood, found.calm), p99_ratio(found.flood, found.control)
    answers: Counter[str] = sum((Counter(turn.answers) for turn in found.turns), Counter())
    seconds = sum(turn.seconds for turn in found.turns)
    turns = {"calm": found.calm, "flood": found.flood, "control": found.control}
    health = {name: quantile(one.health_ms, 0.99) for name, one in turns.items() if one.health_ms}
    delay_ms = round(health["flood"] - health["control"], 1) if len(health) == len(turns) else None
    return {
        "calm": trips(found.calm),
        "control": trips(found.control),
        "flood": trips(found.flood),
        "p99_ratio": calm_ratio,
        "p99_control_ratio": control_ratio,
        "worst_ratio": max(calm_ratio.values(), default=None),
        "worst_control_ratio": max(control_ratio.values(), default=None),
        "healthz_p99_ms": {name: round(one, 1) for name, one in health.items()},
        "healthz_delay_ms": delay_ms,
        "failures": dict(found.flood.failures),
        "answers": dict(answers),
        "sent_per_s": round(answers.total() / seconds) if seconds else None,
        "flooder_cores": round(sum(turn.cpu_s for turn in found.turns) / seconds, 2) if seconds else None,
        "recovery_s": [round(one, 1) for one in found.recovery_s],
        "memory_before_mb": {name: round(value) for name, value in sorted(found.before_mb.items())},
        "memory_after_mb": {name: round(value) for name, value in sorted(found.after_mb.items())},
        "memory_share": round(found.after_mb["gateway"] / allowed_mb, 3),
        "ledger_rows": dict(counts),
        "refusal_rows": refusals,
        "refusal_share": round(refusals / allowed_rows, 3),
    }


def ledger_rows(settings: Settings, stack: LocalStack) -> list[dict[str, Any]]:
    """Return the rows of the ledger, once no more come."""
    reader, count = LedgerReader(settings), -1
    deadline = time.monotonic() + LEDGER_S
    columns = ["principal", "stream_id", "type", "verdict", "reason", "value", "logged_at"]
    while True:
        stack.look_after()
        time.sleep(3)
        rows = reader.rows(columns=columns).rows
        # The principals that behave have ended by now.
        if rows.num_rows == count or time.monotonic() > deadline:
            return list(rows.to_pylist())
        count = rows.num_rows


def measure(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Start the stack, and measure door by door."""
    per_minute = None if args.unlimited else args.per_minute
    doors: dict[str, Door] = {}
    with LocalStack(settings) as stack:
        with operator_client(settings) as operator, CalmClients(settings, operator) as clients:
            for door in args.doors:
                doors[door] = Door(order_of(door, settings, operator, per_minute))
            time.sleep(WARM_S)
            for door, found in doors.items():
                with flooding(found.order, args.nice) as flooder:
                    found.before_mb, found.began_at = memory_mb(stack), time.time()
                    for number in range(args.rounds):
                        one_round(found, clients, flooder, args.seconds, args.nice)
                        ratios = p99_ratio(found.flood, found.calm)
                        say(f"{door}, round {number + 1}: p99 ratios {ratios}, {found.turns[-1].answers}")
                    found.after_mb, found.ended_at = memory_mb(stack), time.time()
        rows = ledger_rows(settings, stack)
    result = {
        door: figures(found, rows_of(rows, found.order), logged_during(rows, found))
        for door, found in doors.items()
    }
    worst = {
        f"worst_{name}": max((one[name] for one in result.values() if one[name] is not None), default=None)
        for name in ("memory_share", "refusal_share", "healthz_delay_ms")
    }
    failures = {f"{door}, calm: {why}" for door, found in doors.items() for why in found.calm.failures}
    return {
        "messages_per_minute": per_minute,
        "seconds": args.seconds,
        "rounds": args.rounds,
        "doors": result,
        "worst_ratio": max((one["worst_ratio"] for one in result.values()), default=None),
        "worst_control_ratio": max((one["worst_control_ratio"] for one in result.values()), default=None),
        **worst,
        "errors": sorted(failures),
    }


def door_names(text: str) -> list[str]:
    """A list such as `http,mqtt`. Raises ArgumentTypeError for an unknown door."""
    found = [part for part in text.split(",") if part]
    unknown = [name for name in found if name not in DOORS]
    if unknown or not found:
        raise argparse.ArgumentTypeError(f"there are {', '.join(DOORS)}")
    return found


def benchmark() -> Bench:
    """Return the program with its options."""
    bench = Bench("flood", __doc__, AT_MOST)
    bench.add_argument("--doors", type=door_names, default=list(DOORS), help="default: all")
    bench.add_argument("--seconds", type=float, default=30, help="the length of a turn (default 30)")
    bench.add_argument("--rounds", type=int, default=2, help="of three turns, at each door (default 2)")
    bench.add_argument("--nice", type=int, default=0, help="raise the flooder's nice value by this (default 0)")
    limits = bench.add_mutually_exclusive_group()
    limits.add_argument("--limited", action="store_true", help="with --per-minute (default)")
    limits.add_argument("--unlimited", action="store_true", help="with the default limits alone")
    text = "messages a minute that the flooder may send (default 600)"
    bench.add_argument("--per-minute", type=int, default=600, help=text)
    return bench


def end_by_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that the flooders end, too: they are no part of the stack."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    end_by_sigterm()
    return benchmark().run(lambda args, work: measure(args, stack_settings(work / "data")))


if __name__ == "__main__":
    sys.exit(main())
