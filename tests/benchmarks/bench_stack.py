"""The stack under a benchmark: a filled topic, the operator's client, peers as child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from connectors.local_stack import LocalStack, child_process
from connectors.log.kafka_topic import ensure_topic
from schemas.keys.sealing import ensure_keyring, load_keyring
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE, kafka_password
from schemas.settings.settings import PROJECT_ROOT, Settings, settings_environment
from tests.benchmarks.event_load import EVENTS_PER_JOB, events, fill, jobs_for, registrations
from tests.broker_processes import accepts

START_S, STOP_S = 60.0, 10.0


def operator_client(settings: Settings) -> httpx.Client:
    """The operator at the stack's gateway."""
    headers = {"Authorization": f"Bearer {settings.operator_token_file.read_text().strip()}"}
    return httpx.Client(base_url=settings.gateway_url, headers=headers, timeout=START_S, trust_env=False)


@contextmanager
def kafka_alone(settings: Settings) -> Iterator[None]:
    """Kafka alone, and these settings in the environment."""
    with LocalStack(settings, parts=("kafka",)):
        ensure_keyring(settings)
        os.environ.update(settings_environment(settings))
        os.environ[PASSWORD_VARIABLE] = kafka_password(settings.kafka)  # for Spark
        yield


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
def filled_topic(settings: Settings, count: int, jobs: int | None = None) -> Iterator[int]:
    """Kafka alone with `count` job events in the topic, and these settings in the environment. Yields how many
    records there are; `jobs` are registered, or as many as the events need.
    """
    with kafka_alone(settings):
        yield fill_topic(settings, count, jobs)


@contextmanager
def served(
    name: str,
    command: Sequence[str | Path],
    port: int,
    work: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A peer as a child process, until the body ends. The body may kill it before."""
    mark, log = f"{work}#{name}", work / f"{name}.log"
    given = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)} if environment is None else environment
    process = child_process.start_child(command, cwd=work, environment=given, mark=mark, log=log)
    try:
        deadline = time.monotonic() + START_S
        while not accepts(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the peer's {name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield process
    finally:
        child_process.stop_child(process, mark, STOP_S, lambda pid: os.kill(pid, signal.SIGTERM))


@contextmanager
def earlier_stack(settings: Settings, checkout: Path) -> Iterator[Settings]:
    """The whole stack of another checkout, run by this Python, until the body ends. Yields settings of clients.

    Args:
        settings: The settings, which the other commit must know.
        checkout: The folder of the other checkout, with `.jars`.
    """
    # Its wrapper would install what its own lock file names.
    command = [sys.executable, "-P", "-m", "connectors.cli"]
    environment = {**os.environ, **settings_environment(settings), "PYTHONPATH": str(checkout.resolve())}

    def call(word: str) -> None:
        subprocess.run([*command, word], cwd=checkout, env=environment, check=True, stdout=sys.stderr)

    call("up")
    try:
        # Kafka did not always ask for a login.
        login = settings.kafka.sasl_password_file or settings.data_path / "keys" / "kafka.password"
        plain = settings.kafka.model_copy(update={"security_protocol": "PLAINTEXT"})
        yield settings if login.exists() else settings.model_copy(update={"kafka": plain})
    finally:
        call("down")
