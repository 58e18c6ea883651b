"""The processes of one seed: our programs as the local stack runs them, with crash points, supervised."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil
import yaml

from connectors.hub.launcher.local_processes import stop_all
from connectors.log.kafka_topic import ensure_topic
from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token
from connectors.programs.local_stack import Part, child_process, free_port
from connectors.programs.local_stack.part_plan import BRIDGE, FILES, GATEWAY, STREAMS, XML_PUMP, PartPlan
from connectors.programs.local_stack.program_plans import READY_FILE
from connectors.programs.local_stack.stack import PLANS
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import (
    PROJECT_ROOT,
    AgentMcpSettings,
    DashboardSettings,
    GatewaySettings,
    MqttSettings,
    Settings,
    ViewSettings,
    XmlPumpSettings,
)
from tests.broker_processes import LOOPBACK, kafka_at
from tests.connectors.doors.http_api.hub_stack import write_agent
from tests.connectors.doors.xml_pump.pump_handlers import FOLDER_VARIABLE as HANDLERS_FOLDER
from tests.connectors.doors.xml_pump.pump_stack import listener
from tests.faults.prove.brokers import Brokers
from tests.faults.prove.crash_points import FOLDER_VARIABLE
from tests.faults.prove.delivery_notes import ATTEMPTS_MOST
from tests.faults.prove.schedule import PEER
from tests.tcp_proxy import PASS, TcpProxy

PARTS: Final = (GATEWAY, PEER, BRIDGE, FILES, XML_PUMP, STREAMS)
MODULES: Final = {
    GATEWAY: "connectors.programs.gateway_program",
    PEER: "connectors.programs.gateway_program",
    BRIDGE: "connectors.doors.mqtt_bridge",
    FILES: "connectors.doors.file_bridge",
    XML_PUMP: "connectors.doors.xml_pump",
}
LISTENER: Final = "worker"
IDLE: Final = "idle"
_WAIT: Final = "import time; time.sleep(600)"
# Some hundred times what the stores of a seed need.
_MOUNT: Final = 'mount -t tmpfs -o size=64m tmpfs "$1" && shift && exec "$@"'
_WRAPPER: Final = PROJECT_ROOT / "tests" / "faults" / "prove" / "crashing_streams.py"


def has_tasks(seed: int) -> bool:
    """True if there is an agent for tasks: a backbone without any must work as well."""
    return seed % 2 == 0


def seed_settings(folder: Path, brokers: Brokers, seed: int) -> Settings:
    """Settings with a topic, tables, checkpoints, a data directory and ids that no other run has."""
    own = f"{seed}.{uuid.uuid4().hex[:6]}"
    organism = folder / "organism.yaml"
    organism.write_text(yaml.safe_dump({"listeners": [listener(LISTENER, "work", "work")]}))
    agents, launchers = folder / "agents", folder / "launchers.yaml"
    agents.mkdir()
    if has_tasks(seed):
        write_agent(agents, IDLE, image="prove/idle")
    launchers.write_text(yaml.safe_dump({"prove/idle": {"command": ["{python}", "-S", "-c", _WAIT]}}))
    hub, mcp = free_port(), free_port()
    return Settings(
        data_dir=folder / "data",
        kafka=kafka_at(brokers.kafka_port, topic=f"prove.{own}", delivery_timeout_s=10),
        mqtt=MqttSettings(
            port=brokers.mosquitto_port,
            topic_prefix=f"prove/{own}/jobs",
            agents_prefix=f"prove/{own}/agents",
            bridge_client_id=f"bridge-{own}",
            connect_timeout_s=3,
            puback_timeout_s=3,
            receipt_timeout_s=4,
            backoff_base_s=0.1,
            backoff_max_s=0.5,
            inbox_retry_s=1,
            # A confirmation may be lost with the session of the bridge.
            inbox_confirm_s=3,
        ),
        gateway=GatewaySettings(
            port=hub,
            url=f"http://127.0.0.1:{free_port()}",
            reactor_group=f"reactor-{own}",
            agents_dir=agents,
            launchers_file=launchers,
            stop_grace_s=0.5,
            task_check_s=2,
            # Shorter than clients wait for an answer.
            launch_timeout_s=4,
            settle_timeout_s=5,
            max_attempts=ATTEMPTS_MOST,
        ),
        agent_mcp=AgentMcpSettings(port=mcp, url=f"http://127.0.0.1:{free_port()}", export_interval_ms=0),
        dashboard=DashboardSettings(port=0),
        views=ViewSettings(interval_ms=500, maintenance_interval_s=3),
        xml_pump=XmlPumpSettings(organism_file=organism, concurrency=8, lease_margin_s=1),
    )


def on_small_disk(command: Sequence[str], folder: Path) -> list[str]:
    """Return a command that runs the program with `folder` on a disk of its own, which ends with it.

    The mount is in a namespace of the program's own, so it needs no root. Where no user may have one, the
    program runs without it, and the fault does not happen.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh", str(folder)]
    may_mount = (
        shutil.which("unshare")
        and not subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode
    )
    return [*(mounted if may_mount else ()), *command]


def wrapped(plan: PartPlan, folder: Path, module: str | None) -> PartPlan:
    """The plan with our crash points around its program, or around this module in its place."""
    environment = {**plan.environment, FOLDER_VARIABLE: str(folder / "points"), HANDLERS_FOLDER: str(folder)}
    if module is None:
        # A JVM that lives for a minute starts sooner, and leaves more to others, without its second compiler.
        options = os.environ.get("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
        command, environment = plan.command, {**environment, "JDK_JAVA_OPTIONS": options}
        return replace(plan, environment=environment, command=lambda: [*command()[:-1], str(_WRAPPER)])
    # A point of the gateway is one of both gateways.
    part = plan.group or plan.name
    program = [sys.executable, "-P", "-m", "tests.faults.prove.crashing_program", part, module]
    return replace(plan, environment=environment, command=lambda: program)


def beside(settings: Settings) -> Settings:
    """The settings of one more gateway, with ports of its own."""
    gateway = settings.gateway.model_copy(update={"port": free_port(), "url": None})
    door = settings.agent_mcp.model_copy(update={"port": free_port(), "url": None})
    return settings.model_copy(update={"gateway": gateway, "agent_mcp": door})


def peer_plan(settings: Settings) -> PartPlan:
    """The plan of the second gateway. `settings` are its own."""
    plan = PLANS[GATEWAY](settings)
    ready = settings.data_path / "run" / f"{PEER}.ready"

    def prepare() -> None:
        ready.unlink(missing_ok=True)

    environment = {**plan.environment, READY_FILE: str(ready)}
    return replace(
        plan, name=PEER, group=GATEWAY, prepare=prepare, is_ready=ready.exists, environment=environment
    )


class Second:
    """One more of a part, started by mistake. `folder` has its log."""

    def __init__(self, name: str, settings: Settings, folder: Path) -> None:
        self.name = name
        self.settings = settings
        # The part that it is one more of.
        self.own = name.partition("_port")[0]
        if name == GATEWAY:
            self.settings = beside(settings)
        self.log_path = folder / f"second-{name}.log"
        self._ready = folder / f"second-{name}.ready"
        plan = PLANS[self.own](self.settings)
        self._plan = replace(
            plan,
            name=f"second_{name}",
            prepare=lambda: None,
            environment={
                **plan.environment,
                READY_FILE: str(self._ready),
                HANDLERS_FOLDER: str(folder),
                FOLDER_VARIABLE: str(folder / "points"),
            },
        )
        self._part = Part(self._plan, self.settings)
        self._part.log_path = self.log_path

    def start(self) -> None:
        """Start it and return at once."""
        self._part.launch()

    @property
    def is_ready(self) -> bool:
        """True if it says that it works."""
        return self._ready.exists()

    @property
    def exit_code(self) -> int | None:
        """How it has ended; None while it runs."""
        process = self._part._process
        return None if process is None else process.poll()

    def log(self) -> str:
        """Return its log."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def kill(self) -> None:
        """End it."""
        self._part.kill()


class SeedParts:
    """Starts, supervises and ends them. For one thread, which must last as long as they. `replaced`: modules in
    the place of a part's own. `has_small_disk`: the local stores of settling have a disk of their own.
    """

    def __init__(
        self, settings: Settings, folder: Path, replaced: Mapping[str, str], *, has_small_disk: bool = False
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.peer_settings = beside(settings)
        modules = MODULES | dict(replaced)
        own = {name: self.peer_settings if name == PEER else settings for name in PARTS}
        plans = {
            name: wrapped(
                peer_plan(own[name]) if name == PEER else PLANS[name](settings), folder, modules.get(name)
            )
            for name in PARTS
        }
        if has_small_disk:
            stores, command = settings.state_path / "settling", plans[STREAMS].command
            plans[STREAMS] = replace(plans[STREAMS], command=lambda: on_small_disk(command(), stores))
        self.parts = {name: Part(plan, own[name]) for name, plan in plans.items()}
        ports = [
            (settings.gateway_url, settings.gateway.port),
            (settings.mcp_server_url, settings.agent_mcp.port),
        ]
        self._ports = [(int(url.rpartition(":")[2]), port) for url, port in ports]
        self.proxies: list[TcpProxy] = []
        self.seconds: list[Second] = []

    def start(self) -> None:
        """Make topic and keys, and start everything; waits for nothing."""
        ensure_keyring(self.settings)
        ensure_operator_token(self.settings)
        ensure_topic(self.settings)
        (self.settings.data_path / "run").mkdir(parents=True, exist_ok=True)
        self.proxies = [TcpProxy(socket.create_server((LOOPBACK, own)), target) for own, target in self._ports]
        for part in self.parts.values():
            part.launch()

    def look_after(self) -> None:
        """Bring back what has died."""
        for part in self.parts.values():
            part.look_after()

    def is_ready(self, *names: str) -> bool:
        """True if these parts, or all, are ready."""
        return all(self.parts[name].state == "ready" for name in names or PARTS)

    def processes(self, name: str) -> Iterator[psutil.Process]:
        """All processes of a part."""
        mark = child_process.mark_of(self.settings.data_path, name)
        # A mark begins like that of a part whose name is longer.
        for process in child_process.marked_processes(mark):
            with suppress(psutil.Error):
                if process.environ().get(child_process.MARK) == mark:
                    yield process

    def signal(self, name: str, number: signal.Signals) -> None:
        """The same signal to all processes of a part."""
        for process in self.processes(name):
            with suppress(psutil.Error):
                process.send_signal(number)

    def limit_files(self, name: str, is_full: bool) -> None:
        """Let no byte be written to any file by the part's processes, as on a full disk; or let them again."""
        for process in self.processes(name):
            with suppress(psutil.Error, OSError):
                _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))

    def second(self, name: str) -> Second:
        """Start one more of a part."""
        found = Second(name, self.settings, self.folder)
        self.seconds.append(found)
        found.start()
        return found

    def heal(self) -> None:
        """Everything runs, is let through and may write."""
        for proxy in self.proxies:
            proxy.mode = PASS
        for name in PARTS:
            self.limit_files(name, is_full=False)
            self.signal(name, signal.SIGCONT)
        for second in self.seconds:
            second.kill()

    def end(self) -> None:
        """Kill everything."""
        for second in self.seconds:
            second.kill()
        for part in self.parts.values():
            part.kill()
        # Agents of tasks outlive a gateway.
        stop_all(self.settings, 0.0)
        for proxy in self.proxies:
            proxy.close()

    def look_after_for(self, seconds: float) -> None:
        """Supervise for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look_after()
            time.sleep(0.1)
