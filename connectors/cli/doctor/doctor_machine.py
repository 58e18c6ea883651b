"""What `trunkline doctor` checks of the machine: programs, disk, keys, settings, ports."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from connectors.cli.doctor.doctor_findings import FAIL, OK, WARN, Finding, private_file
from connectors.gateway_client.gateway_tls import open_plain_listeners
from connectors.local_stack import control
from connectors.local_stack.broker_plans import kafka_port, mqtt_port
from connectors.local_stack.part_plan import GATEWAY, KAFKA, MOSQUITTO
from connectors.local_stack.ports import port_is_free, port_owner
from connectors.local_stack.private_data import find_open, named
from connectors.local_stack.programs import JARS, find_java, find_mosquitto, jar_files, java_version
from schemas.errors import UsageError
from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT, Settings

_GIB = 2**30
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = _GIB, 5 * _GIB


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
    return private_file("keys", path)


def check_data_dir(settings: Settings) -> Finding:
    """The data directory is for its owner alone."""
    root = settings.data_path
    found = find_open(root)
    if found.files or found.folders:
        return Finding("privacy", FAIL, f"other users can open {found} in {root}", "trunkline up closes them")
    if found.left:
        mend = "chmod -R go= them, if they are for nobody else; a secret that others have read needs a new one"
        return Finding("privacy", WARN, f"not private, or not ours: {named(found.left)}", mend)
    return Finding("privacy", OK, f"{root} is for its owner alone")


def check_settings(_settings: Settings) -> Finding:
    """Where the settings come from. Wrong ones end every command before it begins, so these are right."""
    named = os.environ.get("TRUNKLINE_CONF")
    file = Path(named) if named else PROJECT_ROOT / "conf" / "trunkline.yaml"
    source = str(file) if file.exists() else "the defaults"
    variables = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    return Finding("settings", OK, f"{source}, variables: {', '.join(variables) or 'none'}")


def check_plain_listeners(settings: Settings) -> Finding:
    """No listener of the gateway takes tokens in clear from other machines."""
    found = ", ".join(f"{setting} is {host!r}" for setting, host in open_plain_listeners(settings).items())
    if not found:
        return Finding("listeners", OK, "HTTPS, or loopback alone")
    if settings.gateway.allow_plaintext:
        mend = "let only the proxy that does TLS reach it, or set gateway.certfile and gateway.keyfile"
        return Finding("listeners", WARN, f"{found}, in clear: gateway.allow_plaintext is set", mend)
    mend = "./trunkline tls create; or set gateway.allow_plaintext if a proxy in front does TLS"
    return Finding("listeners", FAIL, f"{found}, without TLS: the gateway does not start", mend)


def check_ports(settings: Settings) -> Finding:
    """The ports that a start would need are free; while a stack runs they are its own."""
    state = control.running_state(settings)
    wanted: list[tuple[str, str, Callable[[Settings], int]]] = [
        (KAFKA, "kafka.bootstrap_servers", kafka_port),
        (MOSQUITTO, "mqtt.port", mqtt_port),
        (GATEWAY, "gateway.port", lambda s: s.gateway.port),
    ]
    if settings.agent_mcp.port:
        wanted.append((GATEWAY, "agent_mcp.port", lambda s: s.agent_mcp.port))
    if settings.dashboard.port:
        wanted.append((GATEWAY, "dashboard.port", lambda s: s.dashboard.port))
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
