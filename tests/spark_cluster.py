"""Spark's standalone cluster as child processes: a master and workers on loopback, with their own secret."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from connectors.programs.local_stack import free_port
from connectors.programs.local_stack.java_programs import java_home
from connectors.programs.local_stack.part_plan import spark_home
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE
from schemas.settings.settings import PROJECT_ROOT

LOOPBACK = "127.0.0.1"
START_S = 120.0
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


class SparkCluster:
    """A master and workers below `folder`. Each worker has one core and `worker_memory` for executors.

    `conf_dir` is what a driver needs as SPARK_CONF_DIR; `more` is added to Spark's properties there.
    """

    def __init__(
        self, folder: Path, worker_memory: str = "700m", more: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.conf_dir = folder / "conf"
        self.conf_dir.mkdir(parents=True)
        # As in docs/how-to/use_your_own_kafka_and_spark.md: only the holder of the secret may run code.
        self.properties = {
            "spark.authenticate": "true",
            "spark.authenticate.secret": secrets.token_hex(32),
            "spark.master.rest.enabled": "false",
            "spark.ui.killEnabled": "false",
            **(more or {}),
        }
        defaults = self.conf_dir / "spark-defaults.conf"
        defaults.touch(0o600)
        defaults.write_text("".join(f"{name} {value}\n" for name, value in self.properties.items()))
        self.workers: dict[int, psutil.Popen] = {}
        self._worker_memory = worker_memory
        self._port, self._page = free_port(), free_port()
        self._master: psutil.Popen | None = None

    @property
    def url(self) -> str:
        """The value for the setting `spark.master`."""
        return f"spark://{LOOPBACK}:{self._port}"

    def start(self, workers: int = 2) -> None:
        """Start the master and that many workers; returns when they have found each other."""
        ports = ["--port", str(self._port), "--webui-port", str(self._page)]
        self._master = self._spawn("master", _MASTER, ports)
        # A worker that is told that there is no master tries again after 5 to 15 s.
        self._wait(lambda: self.state() is not None, "the master")
        for number in range(1, workers + 1):
            self._start_worker(number)
        self._wait(lambda: len(self.alive()) == workers, f"{workers} workers")

    def start_worker(self, number: int) -> None:
        """Start one more, or one that was killed again; returns when the master knows it."""
        known = self.alive()
        self._start_worker(number)
        self._wait(lambda: self.alive() - known, f"worker {number}")

    def kill_worker(self, number: int) -> int:
        """SIGKILL for a worker and all that it has started, as when its machine dies; returns how many these
        were."""
        return _kill(self.workers.pop(number))

    def state(self) -> dict[str, Any] | None:
        """Return the state that the master reports, or None while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self._page}/json/", timeout=5) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            # Its server answers before its pages are there.
            return None

    def alive(self) -> set[str]:
        """The ids of the workers that the master counts on; for a moment also of one that was just killed."""
        state = self.state() or {"workers": []}
        return {worker["id"] for worker in state["workers"] if worker["state"] == "ALIVE"}

    def log(self, name: str) -> str:
        """The log of `master` or `worker-<number>`, and those of its executors."""
        paths = [self.folder / f"{name}.log", *sorted((self.folder / name).rglob("stderr"))]
        return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())

    def close(self) -> None:
        """End all of it."""
        for number in list(self.workers):
            self.kill_worker(number)
        if self._master is not None:
            _kill(self._master)
            self._master = None

    def __enter__(self) -> SparkCluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_worker(self, number: int) -> None:
        name = f"worker-{number}"
        size = ["--cores", "1", "--memory", self._worker_memory]
        where = ["--work-dir", str(self.folder / name), "--webui-port", "0"]
        self.workers[number] = self._spawn(name, _WORKER, [*size, *where, self.url])

    def _spawn(self, name: str, daemon: str, arguments: list[str]) -> psutil.Popen:
        scratch = self.folder / f"{name}-scratch"
        scratch.mkdir(exist_ok=True)
        log4j = (PROJECT_ROOT / "conf" / "log4j2.properties").as_uri()
        # The executors read Kafka's password from their environment.
        names = ("HOME", "PATH", "JDK_JAVA_OPTIONS", PASSWORD_VARIABLE)
        kept = {name: os.environ[name] for name in names if name in os.environ}
        environment = {
            **kept,
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(spark_home()),
            "SPARK_CONF_DIR": str(self.conf_dir),
            "SPARK_LOCAL_IP": LOOPBACK,
            "SPARK_LOCAL_DIRS": str(scratch),
            "SPARK_DAEMON_MEMORY": "192m",
            "SPARK_DAEMON_JAVA_OPTS": f"-XX:+UseSerialGC -Dlog4j2.configurationFile={log4j}",
        }
        command = [str(spark_home() / "bin" / "spark-class"), daemon, "--host", LOOPBACK, *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            return psutil.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {START_S} s: {what}; the logs are in {self.folder}")
            time.sleep(0.1)


def _kill(process: psutil.Popen) -> int:
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(20)
    return len(family)
