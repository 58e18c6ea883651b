"""The memory of the gateway with event streams that nobody reads, and what other principals notice of them.

256 clients of four principals follow mailboxes with 16 messages of 1 MB each, and read nothing. Meanwhile the
messages go on, and another principal sends small ones. `memory_mib` is the largest resident memory of the
gateway above that before the streams, when the messages were in the mailboxes already. `idle_p99_ms` and
`busy_p99_ms` are the sends of the other principal without and with the streams.

    ./trunkline bench slow_streams --json
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from connectors.programs.local_stack import LocalStack
from connectors.programs.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import DashboardSettings
from tests.benchmarks.bench_report import Bench, teller
from tests.benchmarks.bench_stack import operator_client
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.own_settings import stack_settings
from tests.slow_readers import memory_of, percentile, seconds_of, slow_readers

MESSAGES = "/api/hub/messages"
READERS = ("ann", "bo", "cy", "di")
SIZE = 1_000_000
MIB = 1024 * 1024
AT_MOST = {"memory_mib": 1024}

say = teller("slow_streams")


def send(client: httpx.Client, recipient: str, size: int) -> None:
    """Send a message with a body of so many bytes."""
    body = {"recipient": recipient, "type": "note", "payload": {"text": "x" * size}}
    client.post(MESSAGES, json=body).raise_for_status()


def peak_of(pid: int, ended: threading.Event) -> int:
    """The largest resident memory of a process until the event."""
    largest = 0
    while not ended.wait(0.2):
        largest = max(largest, memory_of(pid))
    return largest


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Fill the mailboxes, measure without streams, then with them."""
    settings = stack_settings(work / "data", dashboard=DashboardSettings(port=0))
    with LocalStack(settings, parts=(KAFKA, GATEWAY)) as stack, operator_client(stack.settings) as operator:
        pid, url = stack[GATEWAY].pid, stack.settings.gateway_url
        assert pid is not None
        tokens = [add_principal(operator, name, "worker") for name in READERS]
        for name in READERS:
            for _ in range(args.messages):
                send(operator, name, SIZE)
        headers = {"Authorization": f"Bearer {add_principal(operator, 'other', 'worker')}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as other, ThreadPoolExecutor(1) as pool:
            idle = seconds_of(args.sends, lambda: send(other, "operator", 100))
            before, ended = memory_of(pid), threading.Event()
            say(f"{before / MIB:.0f} MiB before the streams")
            peak = pool.submit(peak_of, pid, ended)
            count = args.streams // len(READERS)
            with slow_readers(url, f"{MESSAGES}/events", tokens, count) as opened:
                until, busy = time.monotonic() + args.seconds, []
                while time.monotonic() < until:
                    busy += seconds_of(20, lambda: send(other, "operator", 100))
                    send(operator, READERS[len(busy) // 20 % len(READERS)], SIZE)
                served = sum(one.recv(12).endswith(b"200") for one in opened)
            ended.set()
            busy.sort()
            return {
                "streams": served,
                "memory_mib": round((peak.result() - before) / MIB),
                "idle_p50_ms": round(1000 * percentile(idle, 50), 1),
                "idle_p99_ms": round(1000 * percentile(idle, 99), 1),
                "busy_p50_ms": round(1000 * percentile(busy, 50), 1),
                "busy_p99_ms": round(1000 * percentile(busy, 99), 1),
                "busy_most_ms": round(1000 * busy[-1], 1),
            }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("slow_streams", __doc__, AT_MOST)
    bench.add_argument("--streams", type=int, default=256, help="clients that do not read (default 256)")
    bench.add_argument("--messages", type=int, default=16, help="messages in each mailbox (default 16)")
    bench.add_argument("--seconds", type=float, default=20, help="length of the measurement (default 20)")
    bench.add_argument("--sends", type=int, default=200, help="sends before the streams (default 200)")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
