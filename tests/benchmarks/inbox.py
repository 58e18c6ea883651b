"""How many messages a second come over the MQTT inboxes of agents, until they are claimed in the log.

All messages are in the mailboxes when the agents connect. The time runs from then until each agent has its
messages and no mailbox has a pending one. `*_us` are the microseconds of processor time of a part of the stack,
and of the agents in this program (`load_us`), for each message.

With `--against COMMIT`, this benchmark runs in turns here and in a checkout of that commit. The figures are
medians of all rounds, and `ratio` compares the rates. Limits that were not held are in `not_held`, and the exit
code is 1.

    ./trunkline bench inbox --against HEAD~1 --json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx

from connectors.programs.local_stack import LocalStack, free_port
from connectors.programs.local_stack.part_plan import BRIDGE, GATEWAY, KAFKA, MOSQUITTO
from schemas.settings.settings import PROJECT_ROOT, DashboardSettings, MqttSettings, Settings
from schemas.streams.mailboxes.message import verified_message
from schemas.wire.record import OutgoingRecord
from tests.benchmarks.bench_report import LOAD, Bench, Figures, in_turns, medians, prefixed, ratios, teller
from tests.benchmarks.bench_stack import AGAINST, checkout_of, operator_client, python_path
from tests.benchmarks.event_load import fill
from tests.benchmarks.growth import gateway_lag
from tests.benchmarks.process_times import stack_s
from tests.mailbox_credentials import mailbox_credentials
from tests.own_settings import stack_settings
from trunkline_agent.mqtt.inbox_receiver import InboxMessage
from trunkline_agent.mqtt.mqtt_agent import MqttAgent

AT_LEAST = {"ratio": 0.8}
TEXT = "x" * 300
WITHIN_S = 300.0
PARTS = (KAFKA, MOSQUITTO, BRIDGE, GATEWAY)

say = teller("inbox")


class Counter:
    """Counts the ids that an agent has received."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.ids: set[str] = set()
        self.is_done = threading.Event()

    def take(self, message: InboxMessage) -> None:
        """Note a message."""
        self.ids.add(message.message_id)
        if len(self.ids) >= self._wanted:
            self.is_done.set()


def postings(names: list[str], count: int) -> Iterator[OutgoingRecord]:
    """The records that post `count` messages to each agent, in turns."""
    for number in range(count):
        for name in names:
            message = verified_message(f"{name}-{number}", "bench", name, "note", TEXT, "text/plain")
            yield message.record(door="http", principal="operator")


def pending(operator: httpx.Client, name: str) -> bool:
    """Return whether a mailbox has a pending message."""
    answer = operator.get(f"/api/hub/mailboxes/default/{name}?pending=true&limit=1")
    return bool(answer.raise_for_status().json()["messages"])


def wait_claimed(operator: httpx.Client, names: list[str], deadline: float) -> None:
    """Wait until no mailbox has a pending message."""
    for name in names:
        while pending(operator, name):
            if time.monotonic() > deadline:
                raise RuntimeError(f"messages of {name} are still pending")
            time.sleep(0.02)


def one_round(stack: LocalStack, number: int, agents: int, count: int) -> Figures:
    """Fill the mailboxes of new agents, connect them, and measure."""
    settings, total = stack.settings, agents * count
    names = [f"reader-{number}-{one}" for one in range(agents)]
    with operator_client(settings) as operator, ExitStack() as opened:
        told = {name: operator.post(f"/api/hub/agents/{name}/mqtt", json={}).json() for name in names}
        fill(settings, postings(names, count))
        while gateway_lag(settings):
            time.sleep(0.1)
        counters = {name: Counter(count) for name in names}
        before, began = stack_s(settings), time.monotonic()
        for name in names:
            credentials = mailbox_credentials(settings, name, told[name]["secret"])
            folder = settings.data_path / name
            opened.enter_context(MqttAgent(credentials, folder, counters[name].take, broker=settings.mqtt))
        for counter in counters.values():
            if not counter.is_done.wait(max(0.0, began + WITHIN_S - time.monotonic())):
                raise RuntimeError("an agent did not get its messages")
        wait_claimed(operator, names, began + WITHIN_S)
        took_s, after = time.monotonic() - began, stack_s(settings)
    found = {f"{part}_us": (after[part] - before[part]) / total * 1e6 for part in (*PARTS, LOAD)}
    found |= {"messages_per_s": total / took_s}
    say(f"{found['messages_per_s']:.0f} messages/s")
    return found


def own_figures(work: Path, args: argparse.Namespace) -> Figures:
    """Measure this checkout."""
    mqtt = MqttSettings(port=free_port(), inbox_retry_s=1.0)
    settings: Settings = stack_settings(work / "data", dashboard=DashboardSettings(port=0), mqtt=mqtt)
    with LocalStack(settings, parts=PARTS) as stack:
        rounds = [one_round(stack, number, args.agents, args.messages) for number in range(args.rounds)]
    return medians(rounds)


def figures_of(root: Path, args: argparse.Namespace) -> Figures:
    """Measure one round of a checkout, with its own file of this name: its agents speak to its own bridge."""
    program = root / "tests" / "benchmarks" / "inbox.py"
    if not program.is_file():
        raise SystemExit(
            f"{root} has no tests/benchmarks/inbox.py: give a worktree with the first version of it"
        )
    sizes = ["--agents", str(args.agents), "--messages", str(args.messages), "--rounds", "1"]
    command = [sys.executable, str(program), "--json", *sizes]
    environment = {**os.environ, "PYTHONPATH": python_path(root)}
    ran = subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(ran.stdout))


def run(args: argparse.Namespace, work: Path) -> Figures:
    """Measure this checkout, or this one and another commit in turns."""
    if args.against is None:
        return own_figures(work, args)
    roots = {"ours": PROJECT_ROOT, "before": checkout_of(args.against, work)}
    found = in_turns(args.rounds, {side: partial(figures_of, root, args) for side, root in roots.items()}, say)
    result = {**medians(found["ours"]), **prefixed("before", medians(found["before"]))}
    return {**result, **ratios(result, {"ratio": ("messages_per_s", "before_messages_per_s")})}


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("inbox", __doc__, at_least=AT_LEAST, needs={"ratio": "against"})
    bench.add_argument("--agents", type=int, default=10, help="agents (default 10)")
    bench.add_argument("--messages", type=int, default=300, help="messages of each agent (default 300)")
    bench.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    bench.add_argument("--against", metavar="COMMIT", help=AGAINST)
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
