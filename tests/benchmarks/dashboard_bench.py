"""How soon the dashboard shows what is settled, in Chromium with many jobs, and how it bears many readers.

First the page: 10,000 jobs, then a steady load of job events; how long from Kafka's append time, which is
before the settling, until the page has painted what it changed, and how large the page's JavaScript heap gets.
Then readers of the events at once, some of which never read: how long after the append the others have an
event, what the gateway's memory grows by, and whether the silent ones are gone.

    ./trunkline bench dashboard --json
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
from playwright.sync_api import Page, sync_playwright

from connectors.log.kafka_topic import ensure_topic
from schemas.keys.sealing import ensure_keyring, load_keyring
from schemas.settings.settings import Settings
from tests.benchmarks.bench_report import Bench, quantile, teller
from tests.benchmarks.event_load import TopicWriter, events, fill, jobs_for, registrations
from tests.benchmarks.freshness_load import STEPS_PER_S
from tests.broker_processes import LOOPBACK, kafka_at, make_kafka, wait_until
from tests.connectors.dashboard.dashboard_process import DashboardProcess

START_S = 90.0
# The load begins before and ends after what is measured.
MARGIN_S = 30
_MIB = 2**20
_PAINTED = "() => { const found = window.trunkline.store.latencies; return found.splice(0, found.length); }"


say = teller("dashboard")


def publish(settings: Settings, first: int, count: int, rate: int) -> None:
    """The load of job events, in a process of its own: of the jobs from `first` on, straight into Kafka."""
    writer = TopicWriter(settings, linger_ms=2)
    records, began = list(events(count, first=first)), time.monotonic()
    step = max(1, rate // STEPS_PER_S)
    for number, record in enumerate(records):
        if number % step == 0:
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
        writer.append(record)
    writer.flush()


@contextmanager
def load(settings: Settings, first: int, rate: int, seconds: float) -> Iterator[None]:
    """The load while the body runs."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=publish, args=(settings, first, round(rate * seconds), rate), daemon=True)
    process.start()
    try:
        yield
        if not process.is_alive():
            raise RuntimeError("the load of job events ended before the measurement did")
    finally:
        process.terminate()
        process.join(10)


def settled_per_s(page: Page) -> float:
    """Return the number of records settled per second that the page shows."""
    return float(page.evaluate("() => window.trunkline.store.pulse?.settled_per_s ?? 0"))


def page_figures(dashboard: DashboardProcess, jobs: int, rate: int, seconds: float) -> dict[str, Any]:
    """The page with all jobs loaded, then under load."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("no chromium: apt-get install -y --no-install-recommends chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1360, "height": 860})
        began = time.monotonic()
        page.goto(dashboard.address)
        page.wait_for_function(f"() => window.trunkline?.store.order.length >= {jobs}", timeout=START_S * 1000)
        loaded_s = time.monotonic() - began
        say(f"{jobs} jobs are in the page after {loaded_s:.1f} s")
        counters = page.context.new_cdp_session(page)
        counters.send("Performance.enable")
        with load(dashboard.settings, 0, rate, seconds + 2 * MARGIN_S):
            wait_until(lambda: settled_per_s(page) > 0.8 * rate, MARGIN_S, "the load")
            page.evaluate(_PAINTED)
            took, heap, rates = [], 0.0, []
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                page.wait_for_timeout(500)
                took += page.evaluate(_PAINTED)
                rates.append(settled_per_s(page))
                metrics = {
                    one["name"]: one["value"] for one in counters.send("Performance.getMetrics")["metrics"]
                }
                heap = max(heap, metrics["JSHeapUsedSize"])
            rows = page.locator(".job").count()
        browser.close()
    found = {
        "jobs": jobs,
        "settled_per_s": round(sum(rates) / len(rates)),
        "loaded_s": round(loaded_s, 2),
        "painted_p50_ms": round(quantile(took, 0.5), 1),
        "painted_p95_ms": round(quantile(took, 0.95), 1),
        "painted_p99_ms": round(quantile(took, 0.99), 1),
        "js_heap_mb": round(heap / _MIB, 1),
        "rows_in_the_page": rows,
    }
    say(f"the page: {found}")
    return found


async def follow(session: aiohttp.ClientSession, took: list[float], counted_from: float) -> None:
    """One reader that reads: notes how long after its append each event is there."""
    name = ""
    async with session.get("/api/events") as answer:
        async for line in answer.content:
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif name == "verdict" and line.startswith(b"data: "):
                now = time.time() * 1000
                if now / 1000 >= counted_from:
                    took += [now - said["logged_ms"] for said in orjson.loads(line[6:])]


def silent_reader(dashboard: DashboardProcess) -> socket.socket:
    """A connection that asks for the events and never reads one."""
    found = socket.create_connection((LOOPBACK, dashboard.settings.dashboard.port))
    lines = (
        "GET /api/events HTTP/1.1",
        f"Host: {LOOPBACK}:{dashboard.settings.dashboard.port}",
        f"Authorization: Bearer {dashboard.operator_token}",
        "",
        "",
    )
    found.sendall("\r\n".join(lines).encode())
    return found


async def read_all(dashboard: DashboardProcess, readers: int, seconds: float) -> list[float]:
    """All readers that read, in this process."""
    took: list[float] = []
    headers = {"Authorization": f"Bearer {dashboard.operator_token}"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        dashboard.page, headers=headers, connector=connector, timeout=timeout, read_bufsize=2**20
    ) as session:
        following = [asyncio.create_task(follow(session, took, time.time() + 3)) for _ in range(readers)]
        await asyncio.sleep(seconds)
        for task in following:
            if task.done():
                raise RuntimeError(f"a reader that reads was dropped: {task.exception()}")
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
    return took


def reader_figures(
    dashboard: DashboardProcess, first: int, rate: int, seconds: float, readers: int, silent: int
) -> dict[str, Any]:
    """Readers of the events at once, some of which never read."""
    gateway = psutil.Process(dashboard.program.process.pid)
    with load(dashboard.settings, first, rate, seconds + 2 * MARGIN_S):
        time.sleep(5)
        before, cpu = gateway.memory_info().rss, gateway.cpu_times()
        quiet = [silent_reader(dashboard) for _ in range(silent)]
        took = asyncio.run(read_all(dashboard, readers - silent, seconds))
        after, spent = gateway.memory_info().rss, gateway.cpu_times()
        left = sum(
            connection.laddr.port == dashboard.settings.dashboard.port and connection.status == "ESTABLISHED"
            for connection in gateway.net_connections(kind="tcp")
        )
        for one in quiet:
            one.close()
    found = {
        "readers": readers,
        "silent": silent,
        "silent_left": left,
        "read_p50_ms": round(quantile(took, 0.5), 1),
        "read_p99_ms": round(quantile(took, 0.99), 1),
        "read_events": len(took),
        "memory_growth_mb": round((after - before) / _MIB, 1),
        "gateway_cores": round((spent.user + spent.system - cpu.user - cpu.system) / seconds, 2),
    }
    say(f"the readers: {found}")
    return found


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Kafka and a gateway, without Spark; the page, then the readers."""
    broker = make_kafka(work / "kafka")
    broker.start()
    try:
        settings = Settings(data_dir=work / "data", kafka=kafka_at(broker.port))
        ensure_keyring(settings)
        ensure_topic(settings)
        # Each of the two loads has jobs of its own.
        needed = jobs_for(round(args.rate * (args.seconds + 2 * MARGIN_S)))
        jobs = max(args.jobs, 2 * needed)
        fill(settings, registrations(jobs, load_keyring(settings)))
        dashboard = DashboardProcess(settings, work)
        dashboard.program.wait_ready(START_S)
        try:
            result = page_figures(dashboard, jobs, args.rate, args.seconds)
            result |= reader_figures(dashboard, needed, args.rate, args.seconds, args.readers, args.silent)
        finally:
            dashboard.program.stop()
    finally:
        broker.kill()
    return result


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("dashboard", __doc__)
    bench.add_argument("--jobs", type=int, default=10_000, help="jobs in the page (default 10,000)")
    bench.add_argument("--rate", type=int, default=500, help="settled events a second (default 500)")
    bench.add_argument("--seconds", type=float, default=30, help="length of each measurement (default 30)")
    bench.add_argument("--readers", type=int, default=200, help="readers of the events (default 200)")
    bench.add_argument("--silent", type=int, default=50, help="of which never read (default 50)")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
