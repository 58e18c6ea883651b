"""Real brokers and our own programs as child processes, and what tests wait for."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from pydantic import SecretStr

from connectors.programs.local_stack import free_port
from connectors.programs.local_stack.java_programs import find_java
from connectors.programs.local_stack.part_plan import jar_files
from schemas.settings.kafka_settings import USERNAME
from schemas.settings.settings import PROJECT_ROOT, KafkaSettings, Settings, settings_environment
from tests.forked_programs import ForkedProcess

START_S = 60.0
STOP_S = 20.0
LOOPBACK = "127.0.0.1"
KAFKA_PASSWORD = "of-the-tests-own-brokers"


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0, what: str = "condition") -> Any:
    """The first true answer of `condition`, asked often; fails the test after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


def watch_threads() -> Callable[[], set[int]]:
    """A function that tells which threads of this process have begun since and run still, Kafka's client's too.

    Their number alone would depend on the threads of earlier tests, which end meanwhile.
    """
    process = psutil.Process()
    before = {one.id for one in process.threads()}
    return lambda: {one.id for one in process.threads()} - before


def accepts(port: int) -> bool:
    """True if something listens on a loopback port."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True


def stand_still(process: subprocess.Popen[bytes] | ForkedProcess | None) -> None:
    """SIGSTOP, and wait until each of its threads has stopped: until then it may do one thing more."""

    def is_still() -> bool:
        try:
            tasks = [task.read_text() for task in Path(f"/proc/{process.pid}/task").glob("*/status")]
        except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            return False
        return all("\nState:\tT" in task for task in tasks)

    assert process is not None
    process.send_signal(signal.SIGSTOP)
    wait_until(is_still, what=f"process {process.pid} stands still")


@dataclass
class BrokerProcess:
    """A broker that a test may stop, kill and start again on the same port and data."""

    command: list[str]
    port: int
    log_path: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _log: IO[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it and wait until its port answers."""
        self._log = self.log_path.open("ab")
        self.process = subprocess.Popen(
            self.command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL
        )
        wait_until(self._is_up, START_S, f"{self.command[0]} on port {self.port}")

    def _is_up(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(f"{self.command[0]} ended at its start:\n{self.log_path.read_text()[-3000:]}")
        return accepts(self.port)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it, by SIGTERM in order or by SIGKILL."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_S)
        self.process = None
        if self._log is not None:
            self._log.close()

    def kill(self) -> None:
        """End it at once."""
        self.stop(signal.SIGKILL)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """It is killed, and not there until the block ends."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """It is there and answers nothing until the block ends."""
        stand_still(self.process)
        try:
            yield
        finally:
            assert self.process is not None
            self.process.send_signal(signal.SIGCONT)


# Few threads, and no record twice a second only for metrics: a broker of the session does nothing most of the
# time, and would take 2.7% of a core for that instead of 1.5%.
_KAFKA_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=SASL_PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=SASL_PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=SASL_PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT
sasl.enabled.mechanisms=SCRAM-SHA-512
sasl.mechanism.inter.broker.protocol=SCRAM-SHA-512
listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config=\
  org.apache.kafka.common.security.scram.ScramLoginModule required username="{user}" password="{password}";
log.dirs={folder}/log
auto.create.topics.enable=false
message.max.bytes=8388608
replica.fetch.max.bytes=8388608
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=2
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=16777216
log.index.size.max.bytes=262144
controlled.shutdown.enable=false
metadata.max.idle.interval.ms=0
num.network.threads=1
num.io.threads=2
background.threads=2
"""

_MOSQUITTO_CONF = """\
listener {port} 127.0.0.1
allow_anonymous true
user {user}
persistence true
persistence_location {folder}/
autosave_on_changes false
autosave_interval 300
max_queued_messages 0
max_inflight_messages 1000
message_size_limit 16777216
max_packet_size 16777216
set_tcp_nodelay true
connection_messages false
log_dest stderr
"""


def kafka_at(port: int, **more: Any) -> KafkaSettings:
    """Settings with the login of a Kafka that `make_kafka` has made."""
    login = SecretStr(KAFKA_PASSWORD)
    return KafkaSettings(bootstrap_servers=f"{LOOPBACK}:{port}", sasl_password=login, **more)


@functools.cache
def _formatted() -> tempfile.TemporaryDirectory[str]:
    """A storage as Kafka's own tool formats it, for all the brokers of this process: it takes a JVM."""
    home = tempfile.TemporaryDirectory(prefix="kafka-storage-")
    properties = Path(home.name, "server.properties")
    properties.write_text(_properties(Path(home.name), 1))
    tool = [*_java(), "kafka.tools.StorageTool", "format", "-t", "of-the-tests", "-c", str(properties)]
    tool += ["--add-scram", f"SCRAM-SHA-512=[name={USERNAME},password={KAFKA_PASSWORD}]"]
    done = subprocess.run(tool, capture_output=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return home


def _properties(folder: Path, port: int) -> str:
    ports = {"port": port, "controller": free_port()}
    return _KAFKA_PROPERTIES.format(**ports, folder=folder, user=USERNAME, password=KAFKA_PASSWORD)


def _java() -> list[str]:
    jars = ":".join(map(str, jar_files("kafka")))
    return [str(find_java()), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", jars]


def make_kafka(folder: Path, more: str = "") -> BrokerProcess:
    """A formatted one-node Kafka below `folder` that asks for a login, not started yet; `more` is added to its
    settings.
    """
    shutil.copytree(Path(_formatted().name, "log"), folder / "log")
    port = free_port()
    properties = folder / "server.properties"
    properties.write_text(_properties(folder, port) + more)
    return BrokerProcess([*_java(), "kafka.Kafka", str(properties)], port, folder / "kafka.log")


def make_mosquitto(folder: Path, more: str = "") -> BrokerProcess:
    """A Mosquitto below `folder`, not started yet; `more` is added to its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    user = "root" if os.geteuid() == 0 else os.environ.get("USER", "nobody")
    conf = folder / "mosquitto.conf"
    conf.write_text(_MOSQUITTO_CONF.format(port=port, folder=folder, user=user) + more)
    program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.fail("Mosquitto is not installed; ./trunkline says how")
    return BrokerProcess([program, "-c", str(conf)], port, folder / "mosquitto.log")


def program_environment(settings: Settings) -> dict[str, str]:
    """The environment in which a child process loads `settings`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRUNKLINE", "MQTT_"))}
    # Several gateways run at once: each has the doors beside the hub only where a test gives them ports.
    closed = {"TRUNKLINE__DASHBOARD__PORT": "0", "TRUNKLINE__AGENT_MCP__PORT": "0"}
    # A file that is not there would be an error, so an empty one keeps the checkout's conf out.
    return inherited | closed | settings_environment(settings)


_FORKED = ("connectors.", "tests.connectors.")


class ProgramProcess:
    """One `python -m <module>` of ours as a child process, its log in a file.

    A connector of this checkout, or a program of its tests, is forked (`forked_programs`); any other program is
    started as a user does.
    """

    def __init__(
        self,
        module: str,
        settings: Settings,
        folder: Path,
        name: str = "program",
        root: Path = PROJECT_ROOT,
    ) -> None:
        self.ready_file = folder / f"{name}.{uuid.uuid4().hex[:6]}.ready"
        self.log_path = folder / f"{name}.log"
        environment = program_environment(settings) | {"TRUNKLINE_READY_FILE": str(self.ready_file)}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with self.log_path.open("ab") as log:
            if root == PROJECT_ROOT and module.startswith(_FORKED):
                self.process = ForkedProcess(module, root, environment, log.fileno())
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    cwd=root,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until the program has made its ready file."""

        def ready() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode}:\n{self.log_path.read_text()[-3000:]}")
            return self.ready_file.exists()

        wait_until(ready, timeout_s, f"ready file; log:\n{self.log_path}")

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = STOP_S) -> int:
        """Send a signal and wait for the end. Returns the exit code; kills what does not end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout_s)
            pytest.fail(f"did not end:\n{self.log_path.read_text()[-3000:]}")

    def kill(self) -> None:
        """End it at once, if it has not ended yet."""
        self.process.kill()
        self.process.wait(STOP_S)

    def log(self) -> str:
        """Return the text that it has logged so far."""
        return self.log_path.read_text()


def with_mqtt(settings: Settings, **changes: Any) -> Settings:
    """`settings` with other values in the section `mqtt`."""
    return settings.model_copy(update={"mqtt": settings.mqtt.model_copy(update=changes)})


def with_kafka(settings: Settings, **changes: Any) -> Settings:
    """`settings` with other values in the section `kafka`."""
    return settings.model_copy(update={"kafka": settings.kafka.model_copy(update=changes)})
