"""Measure what deep mailboxes cost: micro-batches, a claim, and the gateway's memory.

Runs the stack on free ports. A mailbox for each depth is filled by records that are appended to the log. Then
the mailboxes take turns: for some seconds, messages come to one of them and are taken out again over HTTP, so
that its depth stays as it is. `batch_ms` is the median of Spark's micro-batches in these seconds, `claim_ms`
that of the requests that take a message, and `gateway_mb` the resident memory of the gateway after the filling.

    ./trunkline bench mailbox_depth --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from connectors.programs.local_stack import LocalStack
from schemas.settings.settings import GatewaySettings, Settings
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import OutgoingRecord
from tests.benchmarks.bench_report import Bench, numbers, teller
from tests.benchmarks.bench_stack import operator_client
from tests.benchmarks.endurance import BatchTimes
from tests.benchmarks.event_load import fill
from tests.benchmarks.freshness import wait_caught_up
from tests.benchmarks.stack_figures import memory_mb
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.own_settings import stack_settings
from trunkline_agent import Agent, Credentials, HubAccess

AT_MOST = {"batch_ratio": 1.2, "claim_ratio": 2.0}
FILL_S = 300.0
# Micro-batches at both ends of a turn may have records of the mailbox before and after.
EDGE_S = 2.0

say = teller("mailbox_depth")


def posts(name: str, count: int) -> Iterator[OutgoingRecord]:
    """Messages to a mailbox, as the gateway posts them."""
    for number in range(count):
        said = {"message_id": f"{name}-{number}", "from": "operator", "to": name, "kind": "note", "body": "{}"}
        yield Message.model_validate(said).record(door="http", principal="operator")


class Mailbox:
    """One mailbox of a depth, with a client of its owner."""

    def __init__(self, stack: LocalStack, settings: Settings, operator: httpx.Client, depth: int) -> None:
        self.depth, self.name = depth, f"depth-{depth}"
        self._operator = operator
        access = HubAccess(settings.gateway_url, add_principal(operator, self.name, "worker"))
        self._owner = Agent(self.name, Credentials(self.name, hub=access))
        limits = {"pending_most": 2 * depth}
        operator.post(f"/api/hub/limits/name/{self.name}", json=limits).raise_for_status()
        fill(settings, posts(self.name, depth))
        wait_until(lambda: self._waiting() == depth, FILL_S, f"{depth} messages are in the mailbox")
        self.gateway_mb = memory_mb(stack)["gateway"]
        self.claims_ms: list[float] = []
        self.turns: list[tuple[float, float]] = []

    def _waiting(self) -> int:
        found = self._operator.get(
            f"/api/hub/mailboxes/default/{self.name}", params={"pending": True, "limit": 1}
        )
        return int(found.raise_for_status().json()["total"])

    def turn(self, seconds: float) -> None:
        """Send a message and take one, again and again."""
        began = time.time()
        while time.time() - began < seconds:
            self._owner.send(self.name, "note", {})
            asked = time.perf_counter()
            message = self._owner.receive(lease_s=None, wait_s=0)
            self.claims_ms.append((time.perf_counter() - asked) * 1000)
            if message is None:
                raise RuntimeError("a claim got no message")
        self.turns.append((began + EDGE_S, time.time()))

    def batches_ms(self, times: BatchTimes) -> list[float]:
        """Return how long the micro-batches took that began and ended in its turns."""
        return [
            times.took_ms[batch]
            for batch, ended in times.ended_s.items()
            if any(
                since <= ended - times.took_ms[batch] / 1000 and ended <= until for since, until in self.turns
            )
        ]


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The figures."""
    settings = stack_settings(
        work / "data", gateway=GatewaySettings(reactor_group="mailbox-depth", settle_timeout_s=30)
    )
    with LocalStack(settings, parts=("kafka", "gateway", "streams")) as stack:
        times = BatchTimes(settings.state_path / "checkpoint")
        times.start()
        with operator_client(settings) as operator:
            boxes = []
            for depth in args.depths:
                boxes.append(Mailbox(stack, settings, operator, depth))
                say(f"{depth} messages wait, the gateway has {boxes[-1].gateway_mb:.0f} MB")
            # Micro-batches with the messages of the filling would be longer than a turn.
            wait_caught_up(settings)
            for number in range(args.rounds):
                for box in boxes if number % 2 else boxes[::-1]:
                    box.turn(args.seconds)
                say(f"round {number + 1} of {args.rounds}")
        time.sleep(EDGE_S)
        times.stop.set()
        times.join()
    batch_ms = {str(box.depth): round(statistics.median(box.batches_ms(times)), 1) for box in boxes}
    claim_ms = {str(box.depth): round(statistics.median(box.claims_ms), 2) for box in boxes}
    least, most = (str(depth) for depth in (min(args.depths), max(args.depths)))
    return {
        "batch_ms": batch_ms,
        "claim_ms": claim_ms,
        "gateway_mb": {str(box.depth): round(box.gateway_mb, 1) for box in boxes},
        "batches": {str(box.depth): len(box.batches_ms(times)) for box in boxes},
        "batch_ratio": round(batch_ms[most] / batch_ms[least], 3),
        "claim_ratio": round(claim_ms[most] / claim_ms[least], 3),
    }


def main() -> int:
    """Measure and print."""
    bench = Bench("mailbox_depth", __doc__, AT_MOST)
    bench.add_argument("--depths", type=numbers, default=[100, 10_000, 100_000], help="messages that wait")
    bench.add_argument("--rounds", type=int, default=6, help="turns of each mailbox (default 6)")
    bench.add_argument("--seconds", type=float, default=15, help="the length of a turn (default 15)")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
