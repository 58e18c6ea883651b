"""The plans of our own programs: bridges, gateway, XML pump, and the streaming jobs under spark-submit."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from connectors.file_bridge.queue_root import queue_root
from connectors.gateway_client.gateway_tls import check_listeners
from connectors.local_stack.part_plan import BRIDGE, FILES, GATEWAY, STREAMS, XML_PUMP, PartPlan
from connectors.local_stack.ports import LOOPBACK, require_free
from connectors.local_stack.programs import java_home, spark_home
from connectors.local_stack.readiness import http_answers
from connectors.local_stack.spark_command import class_path, log_option, place_options
from connectors.mqtt_link.broker_settings import socket_dir
from connectors.mqtt_link.mqtt_credentials import BRIDGE as BRIDGE_ROLE
from connectors.mqtt_link.mqtt_credentials import load_role_passwords
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE, kafka_password
from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT, Settings

# The program creates the file that this variable names when it has subscribed, or its query runs.
READY_FILE = "TRUNKLINE_READY_FILE"
_ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 asked, not listened at
_JOB = PROJECT_ROOT / "jobs" / "run_streams.py"


def _ready_file(settings: Settings, name: str) -> Path:
    return settings.data_path / "run" / f"{name}.ready"


def _bridge_credentials(settings: Settings) -> Mapping[str, str]:
    """The bridge's account at our own Mosquitto, as variables; nothing when the broker is somebody else's."""
    passwords = None if settings.mqtt.accounts_dir is None else load_role_passwords(settings)
    if passwords is None:
        return {}
    return {
        f"{ENV_PREFIX}MQTT__USERNAME": BRIDGE_ROLE,
        f"{ENV_PREFIX}MQTT__PASSWORD": passwords[BRIDGE_ROLE].get_secret_value(),
        f"{ENV_PREFIX}MQTT__SOCKET_DIR": str(socket_dir(settings)),
    }


def _program_plan(settings: Settings, name: str, module: str, summary: str) -> PartPlan:
    """One of our programs that runs with this Python."""
    ready = _ready_file(settings, name)
    return PartPlan(
        name=name,
        summary=summary,
        prepare=lambda: ready.unlink(missing_ok=True),
        command=lambda: [sys.executable, "-P", "-m", f"connectors.{module}"],
        is_ready=ready.exists,
        stop_within_s=15,
        cwd=PROJECT_ROOT,
        environment={READY_FILE: str(ready)},
    )


def bridge_plan(settings: Settings) -> PartPlan:
    """The bridge from MQTT to Kafka."""
    plan = _program_plan(settings, BRIDGE, "mqtt_bridge", "MQTT bridge")
    return replace(plan, credentials=lambda: _bridge_credentials(settings))


def files_plan(settings: Settings) -> PartPlan:
    """The bridge between the file queue and the mailboxes."""
    return _program_plan(settings, FILES, "file_bridge", f"file bridge at {queue_root(settings)}")


def gateway_plan(settings: Settings) -> PartPlan:
    """The gateway: live view, reactor, HTTP hub, dashboard, and the accounts of our own Mosquitto.

    Raises SettingsError for listeners that would be open to other machines without TLS.
    """
    check_listeners(settings)
    plan = _program_plan(settings, GATEWAY, "gateway_program", f"gateway on {settings.gateway_url}")

    gateway = settings.gateway
    host = LOOPBACK if gateway.host in _ANY_ADDRESS else gateway.host

    def is_well() -> bool:
        return http_answers(host, gateway.port, "/healthz", is_tls=gateway.certfile is not None)

    def prepare() -> None:
        require_free(settings.gateway.port, "gateway.port")
        if settings.agent_mcp.port:
            require_free(settings.agent_mcp.port, "agent_mcp.port")
        if settings.dashboard.port:
            require_free(settings.dashboard.port, "dashboard.port")
        plan.prepare()

    return replace(plan, prepare=prepare, is_well=is_well)


def xml_pump_plan(settings: Settings, number: int = 1) -> PartPlan:
    """A process of the XML pump; the second and those after it have their number in their names."""
    name = XML_PUMP if number == 1 else f"{XML_PUMP}_{number}"
    plan = _program_plan(settings, name, "xml_pump", f"XML pump for {settings.gateway_url}")
    return replace(plan, group=XML_PUMP)


def _spark_submit(settings: Settings, scratch: Path) -> list[str]:
    return [
        str(spark_home() / "bin" / "spark-submit"),
        "--properties-file",
        str(PROJECT_ROOT / "conf" / "spark-defaults.conf"),
        *place_options(settings.spark),
        "--driver-memory",
        settings.spark.driver_memory,
        "--driver-class-path",
        class_path(),
        "--driver-java-options",
        log_option(),
        "--conf",
        f"spark.local.dir={scratch}",
        "--conf",
        f"spark.sql.warehouse.dir={settings.data_path / 'warehouse'}",
        "--conf",
        f"spark.sql.shuffle.partitions={settings.spark.shuffle_partitions}",
        str(_JOB),
    ]


def _spark_credentials(settings: Settings) -> Mapping[str, str]:
    """Return the variable in which Spark's JVM looks up the password of the login at Kafka."""
    if not settings.kafka.security_protocol.startswith("SASL"):
        return {}
    return {PASSWORD_VARIABLE: kafka_password(settings.kafka)}


def _terminate_driver(pid: int) -> None:
    """Ask the job's own Python program to end; the JVM around it then follows. The other way round the program
    would lose its JVM in the middle of a micro-batch.
    """
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            # Beside it the JVM has others, and one that has just ended tells nothing of itself.
            with suppress(psutil.Error):
                if any(argument.endswith(_JOB.name) for argument in child.cmdline()):
                    child.terminate()
                    return
        psutil.Process(pid).terminate()


def streams_plan(settings: Settings) -> PartPlan:
    """The jobs that settle events and build the views, in one JVM."""
    ready = _ready_file(settings, STREAMS)
    scratch = settings.data_path / "spark-scratch"

    def prepare() -> None:
        ready.unlink(missing_ok=True)
        # A killed Spark leaves its scratch files behind.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)

    return PartPlan(
        name=STREAMS,
        summary="streaming jobs (Spark)",
        prepare=prepare,
        command=lambda: _spark_submit(settings, scratch),
        is_ready=ready.exists,
        terminate=_terminate_driver,
        stop_within_s=25,
        cwd=PROJECT_ROOT,
        niceness=settings.spark.niceness,
        credentials=lambda: _spark_credentials(settings),
        environment={
            READY_FILE: str(ready),
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(spark_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            # An old address of this machine in its hosts file would make Spark listen elsewhere.
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
    )
