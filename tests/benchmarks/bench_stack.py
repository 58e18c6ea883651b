"""The stack under a benchmark: a filled topic, the operator's client, peers, and a stack of another commit."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from connectors.log.kafka_topic import ensure_topic
from connectors.programs.local_stack import LocalStack, Part, child_process, free_port
from connectors.programs.local_stack.part import child_environment
from connectors.programs.local_stack.part_plan import GATEWAY, KAFKA, PartPlan
from connectors.programs.local_stack.program_plans import PROGRAM_PLANS, READY_FILE
from connectors.programs.local_stack.stack import PLANS
from schemas.keys.sealing import ensure_keyring, load_keyring
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE, kafka_password
from schemas.settings.settings import PROJECT_ROOT, Settings, settings_environment
from tests.benchmarks.bench_report import Figures, in_turns, judged, medians, prefixed, ratios, teller
from tests.benchmarks.event_load import EVENTS_PER_JOB, events, fill, jobs_for, registrations
from tests.broker_processes import accepts

START_S, STOP_S = 60.0, 10.0


def operator_client(settings: Settings) -> httpx.Client:
    """The operator at the stack's gateway."""
    headers = {"Authorization": f"Bearer {settings.operator_token_file.read_text().strip()}"}
    return httpx.Client(base_url=settings.gateway_url, headers=headers, timeout=START_S, trust_env=False)


@contextmanager
def kafka_alone(settings: Settings) -> Iterator[LocalStack]:
    """Kafka alone, and these settings in the environment."""
    with LocalStack(settings, parts=(KAFKA,)) as stack:
        ensure_keyring(settings)
        os.environ.update(settings_environment(settings))
        os.environ[PASSWORD_VARIABLE] = kafka_password(settings.kafka)  # for Spark
        yield stack


def fill_topic(settings: Settings, count: int, jobs: int | None = None, per_job: int = EVENTS_PER_JOB) -> int:
    """Make the topic and append `count` job events. Return how many records it then has.

    Args:
        settings: The settings of Kafka and the topic.
        count: How many events there are.
        jobs: How many jobs are registered. None: as many as the events need.
        per_job: How many events a job has.
    """
    ensure_topic(settings)
    wanted = jobs_for(count, per_job) if jobs is None else jobs
    records = fill(settings, registrations(wanted, load_keyring(settings)))
    return records + fill(settings, events(count, per_job=per_job)) + 1 + settings.kafka.partitions


@contextmanager
def served(
    name: str,
    command: Sequence[str | Path],
    port: int,
    work: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A peer as a child process that accepts connections, until the body ends. The body may kill it before."""
    given = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)} if environment is None else environment
    with _running(command, given, f"{work}#{name}", work / f"{name}.log", lambda: accepts(port)) as process:
        yield process


@contextmanager
def beside(settings: Settings, name: str, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of the benchmarks that runs with the settings of a stack, until the body ends.

    It makes the file of READY_FILE when it is ready. `stack_s` has its processor time under its name.
    """
    ready = settings.data_path / "run" / f"{name}.ready"
    ready.unlink(missing_ok=True)
    environment = {**child_environment(settings), READY_FILE: str(ready)}
    mark = child_process.mark_of(settings.data_path, name)
    log = settings.data_path / "logs" / f"{name}.log"
    command = [sys.executable, "-P", "-m", module, *arguments]
    with _running(command, environment, mark, log, ready.exists) as process:
        yield process


@contextmanager
def _running(
    command: Sequence[str | Path],
    environment: Mapping[str, str],
    mark: str,
    log: Path,
    is_up: Callable[[], bool],
) -> Iterator[subprocess.Popen[bytes]]:
    process = child_process.start_child(command, cwd=log.parent, environment=environment, mark=mark, log=log)
    try:
        deadline = time.monotonic() + START_S
        while not is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{log.stem} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield process
    finally:
        child_process.stop_child(process, mark, STOP_S, lambda pid: os.kill(pid, signal.SIGTERM))


@dataclass(frozen=True)
class Server:
    """A server that is measured: the port of its door, and the processes that do its work, by name."""

    port: int
    pids: Mapping[str, int]


class CheckoutStack(LocalStack):
    """A local stack whose programs are those of another checkout. Its brokers are those of this one.

    Args:
        settings: The settings, which the other checkout must know.
        parts: The names of the parts.
        root: The folder of the checkout.
    """

    def __init__(self, settings: Settings, parts: Iterable[str], root: Path = PROJECT_ROOT) -> None:
        super().__init__(settings, parts)
        self.root = root
        for name in self.parts.keys() & PROGRAM_PLANS.keys():
            self.parts[name] = Part(self._moved(self.parts[name].plan), self.settings)

    def _moved(self, plan: PartPlan) -> PartPlan:
        environment = {**plan.environment, "PYTHONPATH": python_path(self.root)}
        command = plan.command
        if (self.root / "connectors" / "gateway_program" / "__init__.py").exists():  # from before the floors

            def command() -> list[str]:
                return [word.replace(".programs.", ".") for word in plan.command()]

        return replace(plan, cwd=self.root, environment=environment, command=command)

    def server(self, *names: str) -> Server:
        """Return the port of the hub, and the processes of these parts."""
        pids = {name: pid for name in names if (pid := self[name].pid) is not None}
        return Server(self.settings.gateway.port, pids)

    @contextmanager
    def second_gateway(self) -> Iterator[tuple[Settings, Part]]:
        """Run one more gateway over the same Kafka, on ports of its own. Yields its settings and the part."""
        ports = {
            name: part.model_copy(update={"port": free_port()})
            for name in ("gateway", "agent_mcp", "dashboard")
            if (part := getattr(self.settings, name)).port
        }
        settings = self.settings.model_copy(update=ports)
        ready = self.settings.data_path / "run" / "second_gateway.ready"
        plan = replace(
            self._moved(PLANS[GATEWAY](settings)),
            name="second_gateway",
            prepare=lambda: ready.unlink(missing_ok=True),
            is_ready=ready.exists,
        )
        plan = replace(plan, environment={**plan.environment, READY_FILE: str(ready)})
        gateway = Part(plan, settings)
        gateway.start()
        try:
            yield settings, gateway
        finally:
            gateway.stop()


def python_path(root: Path) -> str:
    """Return the search path of Python for the programs of a checkout, the library included."""
    return f"{root}{os.pathsep}{root / 'connectors' / 'agent_sdk'}"


def checkout_of(commit: str, work: Path) -> Path:
    """Return the folder of a commit's files: `commit` itself if it is a folder, or a new one below `work`.

    Raises:
        SystemExit: There is no such commit.
    """
    if Path(commit).is_dir():
        return Path(commit).resolve()
    command = ["git", "-C", str(PROJECT_ROOT), "archive", "--format=tar", commit]
    packed = subprocess.run(command, capture_output=True)
    if packed.returncode:
        raise SystemExit(f"--against {commit}: {packed.stderr.decode().strip()}")
    root = work / "checkout"
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(root, filter="data")
    (root / ".jars").symlink_to(PROJECT_ROOT / ".jars")
    return root


AGAINST = "a commit, or the folder of its checkout, to compare with in turns"


def compared_with_commit(
    args: argparse.Namespace,
    work: Path,
    settings_in: Callable[[Path], Settings],
    prepare: Callable[[CheckoutStack], Callable[[], Figures]],
    rate: str | None = None,
) -> Figures:
    """Measure Kafka and gateway of this checkout and of another commit in turns, both under the same load.

    Args:
        args: `against`, the commit or the folder of its checkout, and `rounds`.
        work: A folder for the files.
        settings_in: Returns settings on free ports, with a data directory.
        prepare: Returns the function that measures one round of a running stack.
        rate: The figure that `ratio_before` compares. None: it compares the processor time of an operation.
    """
    parts, root = (KAFKA, GATEWAY), checkout_of(args.against, work)
    with (
        CheckoutStack(settings_in(work / "data"), parts) as ours,
        CheckoutStack(settings_in(work / "before"), parts, root) as before,
    ):
        sides = {"ours": prepare(ours), "before": prepare(before)}
        found = in_turns(args.rounds, sides, teller(f"against {args.against}"))
    result = {**medians(found["ours"]), **prefixed("before", medians(found["before"]))}
    us = ("before_us_per_op", "us_per_op")
    pairs = {"ratio_before": (rate, f"before_{rate}") if rate else us, "ratio_before_us": us}
    pairs["ratio_before_roundtrips"] = ("roundtrips_per_s", "before_roundtrips_per_s")
    pairs["ratio_before_roundtrip_us"] = ("before_us_per_roundtrip", "us_per_roundtrip")
    result |= ratios(result, pairs)
    judged_ratios = [name for name in ("ratio_before", "ratio_before_roundtrips") if name in result]
    return {**result, **judged(result, {}, dict.fromkeys(judged_ratios, 0.97))}
