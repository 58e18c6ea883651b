"""The plans by which the stack runs Trunkline's programs: bridges, gateway, XML pump, and the Spark jobs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.plumbing.gateway_client.gateway_access import check_listeners
from connectors.plumbing.mqtt_link.broker_settings import BRIDGE as BRIDGE_ROLE
from connectors.plumbing.mqtt_link.broker_settings import load_role_passwords, socket_dir
from connectors.programs.local_stack.java_programs import java_home
from connectors.programs.local_stack.part_plan import (
    BRIDGE,
    FILES,
    GATEWAY,
    JVM_LOCALE,
    STREAMS,
    XML_PUMP,
    PartPlan,
    class_path,
    jvm_options,
    numbered,
    place_options,
    spark_home,
)
from connectors.programs.local_stack.ports import LOOPBACK, http_answers, require_free
from schemas.keys.record_macs import FILE_BRIDGE, MQTT_BRIDGE, write_mac_key
from schemas.keys.sealing import load_keyring
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE, kafka_password
from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT, Settings

# A program creates the file in this variable when it has subscribed, or when its query runs.
READY_FILE = "TRUNKLINE_READY_FILE"
_ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 asked, not listened at
_JOB = PROJECT_ROOT / "jobs" / "run_streams.py"


def _bridge_credentials(settings: Settings) -> Mapping[str, str]:
    """Return the bridge's account at the stack's Mosquitto, as variables; empty for another MQTT broker."""
    passwords = None if settings.mqtt.accounts_dir is None else load_role_passwords(settings)
    if passwords is None:
        return {}
    return {
        f"{ENV_PREFIX}MQTT__USERNAME": BRIDGE_ROLE,
        f"{ENV_PREFIX}MQTT__PASSWORD": passwords[BRIDGE_ROLE].get_secret_value(),
        f"{ENV_PREFIX}MQTT__SOCKET_DIR": str(socket_dir(settings)),
    }


def _mac_key(settings: Settings, signer: str) -> Mapping[str, str]:
    """Write the key for the MACs of a bridge's records, and return the variable that names the file."""
    if settings.mac_key_file is not None:
        return {}
    path = settings.data_path / "keys" / f"mac-{signer}.json"
    write_mac_key(load_keyring(settings), signer, path)
    return {f"{ENV_PREFIX}MAC_KEY_FILE": str(path)}


def _python(module: str) -> Callable[[], list[str]]:
    return lambda: [sys.executable, "-P", "-m", f"connectors.{module}"]


def _program_plan(settings: Settings, name: str, summary: str, command: Callable[[], list[str]]) -> PartPlan:
    """Return the plan of a program that makes its readiness file."""
    ready = settings.data_path / "run" / f"{name}.ready"
    return PartPlan(
        name=name,
        summary=summary,
        prepare=lambda: ready.unlink(missing_ok=True),
        command=command,
        is_ready=ready.exists,
        stop_within_s=15,
        cwd=PROJECT_ROOT,
        environment={READY_FILE: str(ready)},
    )


def bridge_plan(settings: Settings) -> PartPlan:
    """Return the plan by which the stack runs the bridge from MQTT to Kafka."""
    plan = _program_plan(settings, BRIDGE, "MQTT bridge", _python("doors.mqtt_bridge"))
    return replace(
        plan, credentials=lambda: {**_bridge_credentials(settings), **_mac_key(settings, MQTT_BRIDGE)}
    )


def files_plan(settings: Settings) -> PartPlan:
    """Return the plan by which the stack runs the bridge between the file queue and the mailboxes."""
    plan = _program_plan(
        settings, FILES, f"file bridge at {queue_root(settings)}", _python("doors.file_bridge")
    )
    return replace(plan, credentials=lambda: _mac_key(settings, FILE_BRIDGE))


def gateway_plan(settings: Settings) -> PartPlan:
    """Return the plan by which the stack runs the gateway.

    Raises:
        SettingsError: The gateway would be open to other machines without TLS.
    """
    check_listeners(settings)
    plan = _program_plan(
        settings, GATEWAY, f"gateway on {settings.gateway_url}", _python("programs.gateway_program")
    )
    gateway = settings.gateway
    host = LOOPBACK if gateway.host in _ANY_ADDRESS else gateway.host

    def is_well() -> bool:
        return http_answers(host, gateway.port, "/healthz", is_tls=gateway.certfile is not None)

    def prepare() -> None:
        for name in ("gateway", "agent_mcp", "dashboard"):
            if port := getattr(settings, name).port:
                require_free(port, f"{name}.port")
        plan.prepare()

    return replace(plan, prepare=prepare, is_well=is_well)


def xml_pump_plan(settings: Settings, number: int = 1) -> PartPlan:
    """Return the plan by which the stack runs one process of the XML pump.

    `number` counts the processes from 1. From the second on, the part's name contains it.
    """
    plan = _program_plan(
        settings, numbered(XML_PUMP, number), f"XML pump for {settings.gateway_url}", _python("doors.xml_pump")
    )
    return replace(plan, group=XML_PUMP)


def _spark_submit(settings: Settings, scratch: Path, local_dir: Path) -> list[str]:
    return [
        str(spark_home() / "bin" / "spark-submit"),
        *("--properties-file", str(PROJECT_ROOT / "conf" / "spark-defaults.conf")),
        *place_options(settings),
        *("--driver-memory", settings.spark.driver_memory),
        *("--driver-class-path", class_path()),
        *("--driver-java-options", jvm_options(settings.kafka)),
        *("--conf", f"spark.local.dir={local_dir}"),
        # Nothing is fetched here, but Spark makes a cache in the home folder, which this user may not have.
        *("--conf", f"spark.jars.ivy={scratch / 'ivy'}"),
        *("--conf", f"spark.sql.warehouse.dir={settings.data_path / 'warehouse'}"),
        str(_JOB),
    ]


def _spark_credentials(settings: Settings) -> Mapping[str, str]:
    """Return the variable from which Spark's JVM reads the password of the login at Kafka."""
    if not settings.kafka.security_protocol.startswith("SASL"):
        return {}
    return {PASSWORD_VARIABLE: kafka_password(settings.kafka)}


def _terminate_driver(pid: int) -> None:
    """Ask the job's Python program to end; its JVM then ends, too.

    If the JVM ended first, the program would lose it in the middle of a micro-batch.
    """
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            # The JVM has other children, too, and one that has just ended has no command line.
            with suppress(psutil.Error):
                if any(argument.endswith(_JOB.name) for argument in child.cmdline()):
                    child.terminate()
                    return
        psutil.Process(pid).terminate()


def streams_plan(settings: Settings) -> PartPlan:
    """Return the plan by which the stack runs the Spark jobs that settle events and build the views.

    They run in one JVM.

    Raises:
        TrunklineError: Java or Spark is not installed.
    """
    scratch = settings.data_path / "spark-scratch"
    links = ExitStack()
    local_dir = scratch

    def prepare() -> None:
        nonlocal local_dir
        plan.prepare()
        # A killed Spark leaves its scratch files behind.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        links.close()
        if "," in str(scratch):  # spark.local.dir is a list with commas, which knows no escapes
            local_dir = Path(links.enter_context(TemporaryDirectory(prefix="trunkline-"))) / "scratch"
            local_dir.symlink_to(scratch)

    command = lambda: _spark_submit(settings, scratch, local_dir)  # noqa: E731
    plan = _program_plan(settings, STREAMS, "streaming jobs (Spark)", command)

    return replace(
        plan,
        prepare=prepare,
        terminate=_terminate_driver,
        stop_within_s=25,
        niceness=settings.spark.niceness,
        credentials=lambda: _spark_credentials(settings),
        environment={
            **plan.environment,
            **JVM_LOCALE,
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(spark_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            # An outdated address in this machine's hosts file would make Spark listen elsewhere.
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
    )


PROGRAM_PLANS = {
    BRIDGE: bridge_plan,
    FILES: files_plan,
    GATEWAY: gateway_plan,
    XML_PUMP: xml_pump_plan,
    STREAMS: streams_plan,
}
