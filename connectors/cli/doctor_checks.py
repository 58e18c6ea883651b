"""What `trunkline doctor` checks: each check looks at one thing and says how to mend it."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from connectors.local_stack import control
from connectors.local_stack.broker_plans import kafka_port, mqtt_port
from connectors.local_stack.part_plan import BRIDGE, KAFKA, MOSQUITTO, SETTLE
from connectors.local_stack.ports import port_is_free, port_owner
from connectors.local_stack.programs import JARS, find_java, find_mosquitto, jar_files, java_version
from connectors.local_stack.readiness import mqtt_answers
from schemas.errors import TrunklineError, UsageError
from schemas.settings import ENV_PREFIX, PROJECT_ROOT, Settings

OK, WARN, FAIL = "ok", "warn", "fail"
_GIB = 2**30
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = _GIB, 5 * _GIB
_START = "start it: trunkline up"
_RESTART = "see trunkline logs; then trunkline down and trunkline up"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    check: str
    level: str
    found: str
    mend: str = ""


def _stamp_fits(stamp: Path, source: Path) -> bool:
    try:
        noted = stamp.read_text(encoding="utf-8").split()
    except OSError:
        return False
    return bool(noted) and noted[-1] == hashlib.sha256(source.read_bytes()).hexdigest()


def check_python(_settings: Settings) -> Finding:
    """The environment is the one that requirements.lock describes."""
    found = f"Python {platform.python_version()}"
    if _stamp_fits(PROJECT_ROOT / ".venv" / ".trunkline-stamp", PROJECT_ROOT / "requirements.lock"):
        return Finding("python", OK, f"{found}, packages as in requirements.lock")
    mend = "run any ./trunkline command: it sets .venv up again"
    return Finding("python", WARN, f"{found}, but .venv is not what requirements.lock says", mend)


def check_java(_settings: Settings) -> Finding:
    """A Java 17 is there."""
    java = find_java()
    return Finding("java", OK, f"{java_version(java)} at {java}")


def check_jars(_settings: Settings) -> Finding:
    """The JVM parts are those of conf/ivy.xml."""
    found = f"{len(jar_files('kafka'))} for Kafka, {len(jar_files('spark'))} for Spark"
    if _stamp_fits(JARS / ".trunkline-stamp", PROJECT_ROOT / "conf" / "ivy.xml"):
        return Finding("jars", OK, found)
    return Finding("jars", WARN, f"{found}, but not what conf/ivy.xml says", "run any ./trunkline command")


def check_mosquitto(_settings: Settings) -> Finding:
    """Mosquitto is installed."""
    return Finding("mosquitto", OK, str(find_mosquitto()))


def check_disk(settings: Settings) -> Finding:
    """There is room for the log and the tables."""
    folder = settings.data_path
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.1f} GiB free at {settings.data_path}"
    mend = "make room, or set data_dir to a larger disk"
    if free < _DISK_WARN_BYTES:
        return Finding("disk", FAIL if free < _DISK_FAIL_BYTES else WARN, found, mend)
    return Finding("disk", OK, found)


def check_key_file(settings: Settings) -> Finding:
    """The master keys are there and only ours to read."""
    if settings.master_key is not None:
        return Finding("keys", OK, "the master key comes from the environment")
    path = settings.key_file
    if not path.exists():
        return Finding("keys", WARN, f"{path} is not there yet", "trunkline up makes it")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return Finding("keys", FAIL, f"{path} can be read by others (mode {mode:o})", f"chmod 600 {path}")
    return Finding("keys", OK, f"{path}, mode {mode:o}")


def check_settings(_settings: Settings) -> Finding:
    """Where the settings come from. Wrong ones end every command before it begins, so these are right."""
    named = os.environ.get("TRUNKLINE_CONF")
    file = Path(named) if named else PROJECT_ROOT / "conf" / "trunkline.yaml"
    source = str(file) if file.exists() else "the defaults"
    variables = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    return Finding("settings", OK, f"{source}, variables: {', '.join(variables) or 'none'}")


def check_ports(settings: Settings) -> Finding:
    """The ports that a start would need are free; while a stack runs they are its own."""
    state = control.running_state(settings)
    wanted: list[tuple[str, str, Callable[[Settings], int]]] = [
        (KAFKA, "kafka.bootstrap_servers", kafka_port),
        (MOSQUITTO, "mqtt.port", mqtt_port),
    ]
    found = []
    for part, setting, port_of in wanted:
        try:
            port = port_of(settings)
        except UsageError:
            found.append(f"{part} is elsewhere")
            continue
        if state is not None and part in state["parts"]:
            found.append(f"{port} is our {part}")
        elif not port_is_free(port):
            taken = f"{port} ({setting}) is taken by {port_owner(port)}"
            return Finding("ports", WARN, taken, f"end that, or set {setting} to another port")
        else:
            found.append(f"{port} is free")
    return Finding("ports", OK, ", ".join(found))


def _is_started(settings: Settings, part: str) -> bool:
    state = control.running_state(settings)
    return state is not None and part in state["parts"]


def check_kafka(settings: Settings) -> Finding:
    """Kafka answers, and the topic has the partitions and the epoch of the settings."""
    from schemas.event_topic import check_topic, reach_kafka

    where = settings.kafka.bootstrap_servers
    try:
        reach_kafka(settings.kafka, timeout_s=2.0)
    except TrunklineError as error:
        level, mend = (FAIL, _RESTART) if _is_started(settings, KAFKA) else (WARN, _START)
        return Finding("kafka", level, str(error), mend)
    try:
        check_topic(settings)
    except TrunklineError as error:
        return Finding("kafka", FAIL, str(error), "the message says what to change")
    found = f"{where}, topic {settings.kafka.topic} with {settings.kafka.partitions} partitions"
    return Finding("kafka", OK, found)


def check_mqtt(settings: Settings) -> Finding:
    """An MQTT broker answers."""
    mqtt = settings.mqtt
    where = f"{mqtt.host}:{mqtt.port}"
    if mqtt.tls:
        # Only whether there is somebody: the programs check certificates and say what is wrong with them.
        try:
            socket.create_connection((mqtt.host, mqtt.port), timeout=2.0).close()
            return Finding("mqtt", OK, f"{where} is open (TLS, not looked into)")
        except OSError as error:
            return Finding("mqtt", FAIL, f"{where}: {error}", "check mqtt.host and mqtt.port")
    if mqtt_answers(mqtt.host, mqtt.port, timeout_s=2.0):
        return Finding("mqtt", OK, where)
    level, mend = (FAIL, _RESTART) if _is_started(settings, MOSQUITTO) else (WARN, _START)
    return Finding("mqtt", level, f"{where} does not answer", mend)


def _check_part(settings: Settings, name: str) -> Finding:
    status = next(part for part in control.part_statuses(settings) if part.name == name)
    if not _is_started(settings, name):
        return Finding(name, WARN, "not started here", _START)
    found = f"{status.state}, restarts: {status.restarts}"
    if status.state == "ready":
        return Finding(name, OK if status.restarts == 0 else WARN, found, _why(status.restarts, name))
    return Finding(name, FAIL, found, f"trunkline logs {name} says why")


def _why(restarts: int, name: str) -> str:
    return f"it died before: trunkline logs {name} says why" if restarts else ""


def check_bridge(settings: Settings) -> Finding:
    """The bridge lives."""
    return _check_part(settings, BRIDGE)


def check_settle(settings: Settings) -> Finding:
    """The settling job lives."""
    return _check_part(settings, SETTLE)


CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "python": check_python,
    "java": check_java,
    "jars": check_jars,
    "mosquitto": check_mosquitto,
    "disk": check_disk,
    "keys": check_key_file,
    "settings": check_settings,
    "ports": check_ports,
    "kafka": check_kafka,
    "mqtt": check_mqtt,
    "bridge": check_bridge,
    "settle": check_settle,
}


def run_checks(settings: Settings) -> list[Finding]:
    """All findings, in order. A check that cannot be made is a finding itself."""
    found = []
    for name, check in CHECKS.items():
        try:
            found.append(check(settings))
        except (TrunklineError, OSError) as error:
            found.append(Finding(name, FAIL, str(error), "the message says what to do"))
    return found
