"""The stack that the demo runs on, a separate one or that of `trunkline up`, and the display of its steps."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from connectors.programs.local_stack import LocalStack, control, free_port
from connectors.programs.local_stack.part_plan import ALL_PARTS
from connectors.programs.local_stack.ports import LOOPBACK
from connectors.tools.demo.scenes import Tick
from schemas.log_access.kafka_clients import bootstrap_addresses
from schemas.settings.settings import (
    AgentMcpSettings,
    DashboardSettings,
    KafkaSettings,
    MqttSettings,
    Settings,
    StorageSettings,
)
from trunkline_agent.broker import LOOPBACK_NAMES

_LINE_EVERY_S: Final = 5.0
_REWRITE: Final = "\r\033[K"
# The folders that are removed after the demo; tables, keys and logs stay.
_SPENT: Final = ("kafka", "mosquitto", "state", "spark-scratch", "warehouse", "run", "publisher")
_RECEIPT_S: Final = 30.0
# The default would take half a minute to miss a killed agent.
_TASK_CHECK_S: Final = 2.0


class Progress:
    """A display of numbered steps on standard error, with the time that each takes.

    A terminal shows the current step in place; a file gets a line at most every five seconds. `steps` is the
    number of all steps.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._live = sys.stderr.isatty()
        self._number = 0
        self._text = ""
        self._started = self._last_line = time.monotonic()

    def begin(self, text: str) -> None:
        """Print that the next step begins, with `text` as its title."""
        self._number += 1
        self._text = text
        self._started = self._last_line = time.monotonic()
        self.say(f"{self._head()} ...", live=True)

    def update(self, state: str) -> None:
        """Print `state` as the current state of the step. In a file, most updates are left out."""
        line = f"{self._head()}: {state} ({self._seconds():.0f} s)"
        if self._live:
            self.say(line, live=True)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(line)

    def done(self, result: str) -> None:
        """Print that the current step has ended, with the text `result` and the duration of the step."""
        self.say(f"{self._head()}: {result} ({self._seconds():.1f} s)")

    def _head(self) -> str:
        return f"[{self._number}/{self._steps}] {self._text}"

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, line: str, *, live: bool = False) -> None:
        """Print a line on standard error. On a terminal, the next line overwrites it if `live` is set."""
        if not self._live:
            print(line, file=sys.stderr, flush=True)
        elif live:
            width = shutil.get_terminal_size().columns - 1
            print(f"{_REWRITE}{line[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{_REWRITE}{line}", file=sys.stderr, flush=True)


def own_settings(settings: Settings, data_dir: Path) -> Settings:
    """Return settings of a separate stack, with free ports and all data in `data_dir`.

    Limits and other settings are those of `settings`.
    """
    address = f"{LOOPBACK}:{free_port()}"
    return Settings(
        data_dir=data_dir.absolute(),
        tls_dir=settings.tls_path,
        kafka=_own_kafka(settings).model_copy(
            update={"bootstrap_servers": address, "replication_factor": 1, "min_in_sync_replicas": None}
        ),
        mqtt=_own_mqtt(settings),
        gateway=settings.gateway.model_copy(
            update={
                "host": LOOPBACK,
                "port": free_port(),
                "url": None,
                "operator_token_file": None,
                "task_check_s": _TASK_CHECK_S,
            }
        ),
        dashboard=DashboardSettings(host=LOOPBACK, port=free_port()),
        agent_mcp=AgentMcpSettings(host=LOOPBACK, port=free_port()),
        views=settings.views,
        limits=settings.limits,
        spark=settings.spark,
        storage=StorageSettings(),
    )


def _own_kafka(settings: Settings) -> KafkaSettings:
    """Return Kafka's settings with the configured login if it is our Kafka under TLS, else a new one."""
    kafka = settings.kafka
    is_ours = all(host in LOOPBACK_NAMES for host, _ in bootstrap_addresses(kafka))
    if is_ours and kafka.security_protocol == "SASL_SSL" and (settings.tls_path / "kafka.pem").exists():
        return kafka
    fields = KafkaSettings.model_fields
    login = [name for name in fields if name == "security_protocol" or name.startswith(("sasl_", "ssl_"))]
    return kafka.model_copy(update={name: fields[name].default for name in login})


def _own_mqtt(settings: Settings) -> MqttSettings:
    """Return settings of a broker on a free port, under TLS if the configured local broker is."""
    mqtt = settings.mqtt
    found: dict[str, Any] = {"host": LOOPBACK, "port": free_port(), "receipt_timeout_s": _RECEIPT_S}
    if mqtt.tls and mqtt.host in LOOPBACK_NAMES and (settings.tls_path / "mosquitto.crt").exists():
        same = ("tls", "ca_certs", "certfile", "keyfile", "require_client_cert")
        found |= {name: getattr(mqtt, name) for name in same}
    return MqttSettings(**found)


@contextmanager
def own_stack(settings: Settings, progress: Progress) -> Iterator[Tick]:
    """Start a stack, wait until it is ready, and stop it at the end of the `with` block.

    It yields a function that restarts parts which have ended. Call that function a few times a second. Raises
    TrunklineError if a part does not start; the started parts are stopped then.

    Args:
        settings: The settings of the stack, as `own_settings` returns them.
        progress: The display of the steps.
    """
    stack = LocalStack(settings)

    def watch() -> bool:
        parts = {name: part.as_json() for name, part in stack.parts.items()}
        progress.update(_waiting_for(parts))
        return False

    progress.begin("Start Kafka, Mosquitto, bridge, gateway, Spark")
    try:
        stack.start(watch)
        progress.done(f"ready, on {settings.kafka.bootstrap_servers} and {LOOPBACK}:{settings.mqtt.port}")
        yield stack.look_after
    finally:
        started = time.monotonic()
        progress.say("Stopping what was started ...")
        stack.stop()
        progress.say(f"Stopped after {time.monotonic() - started:.1f} s")


@contextmanager
def kept_stack(settings: Settings, progress: Progress) -> Iterator[Tick]:
    """Start the configured stack as `trunkline up` does, and leave it running after the `with` block.

    A stack that runs already is used as it is. Ctrl-C in the block stops the stack if this call started it. It
    yields a function that does nothing, because the stack's own supervisor restarts its parts. Raises
    TrunklineError if a part is not ready in time.
    """
    ran_before = control.running_state(settings) is not None
    progress.begin("Start the stack that stays")
    control.start_detached(settings, ALL_PARTS, lambda state: progress.update(_waiting_for(state["parts"])))
    progress.done("it ran already" if ran_before else "ready")
    try:
        yield lambda: None
    except KeyboardInterrupt:
        if not ran_before:
            progress.say("Stopping what was started ...")
            control.stop_detached(settings, lambda state: None)
        raise


def clear_spent(data_dir: Path) -> None:
    """Delete all but tables, keys and log files from the data directory of a demo that has stopped."""
    for name in _SPENT:
        shutil.rmtree(data_dir / name, ignore_errors=True)


def _waiting_for(parts: dict[str, Any]) -> str:
    waiting = [name for name, part in parts.items() if part["state"] != "ready"]
    return f"waiting for {', '.join(waiting)}" if waiting else "ready"
