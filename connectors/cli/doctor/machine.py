"""Checks of `trunkline doctor` on the machine. Each returns a Finding: ok, or a fault and its repair.

A check that raises an error counts as a failure.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from connectors.cli.doctor.findings import Checks, Finding, fail, is_started, ok, private_file, warn
from connectors.plumbing.gateway_client.gateway_access import open_plain_listeners
from connectors.plumbing.tls_keys.served_certificates import WARN_DAYS, certificate_ends, days_left
from connectors.programs.local_stack import control, memory
from connectors.programs.local_stack.data_files import find_open, named
from connectors.programs.local_stack.java_programs import SERVING, find_java, java_version, passed_over_home
from connectors.programs.local_stack.kafka_plan import kafka_ports
from connectors.programs.local_stack.mosquitto_plan import mqtt_port
from connectors.programs.local_stack.part_plan import (
    ALL_PARTS,
    GATEWAY,
    JARS,
    KAFKA,
    MOSQUITTO,
    find_mosquitto,
    jar_files,
    numbered,
)
from connectors.programs.local_stack.ports import port_is_free, port_owner
from connectors.programs.local_stack.stack import plans_of
from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT, Settings, SettingsError, settings_file
from trunkline_agent.errors import TrunklineError, UsageError

_GIB = 2**30
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = _GIB, 5 * _GIB
CHECKS = Checks()
_RENEW = "renew it: for the stack's own, ./trunkline tls create --renew (docs/how-to/rotate_keys.md)"


def _stamp_fits(stamp: Path, source: Path) -> bool:
    try:
        noted = stamp.read_text(encoding="utf-8").split()
    except OSError:
        return False
    return bool(noted) and noted[-1] == hashlib.sha256(source.read_bytes()).hexdigest()


@CHECKS.add("python")
def check_python(_settings: Settings) -> Finding:
    """Check that the Python packages in .venv are those of requirements.lock; a difference is a warning."""
    found = f"Python {platform.python_version()}"
    if _stamp_fits(PROJECT_ROOT / ".venv" / ".trunkline-stamp", PROJECT_ROOT / "requirements.lock"):
        return ok(f"{found}, packages as in requirements.lock")
    mend = "run any ./trunkline command: it sets .venv up again"
    return warn(f"{found}, but .venv is not what requirements.lock says", mend)


@CHECKS.add("java")
def check_java(_settings: Settings) -> Finding:
    """Check that a Java that serves is installed; one in JAVA_HOME that does not serve is a warning.

    Raises TrunklineError, which the doctor shows as a failure, if none is installed.
    """
    java = find_java()
    found = f"{java_version(java)} at {java}"
    if why := passed_over_home():
        return warn(f"{found}; {why}", f"set JAVA_HOME to {SERVING}, or unset it")
    return ok(found)


@CHECKS.add("jars")
def check_jars(_settings: Settings) -> Finding:
    """Check that the jar files of Kafka and Spark are those of conf/ivy.xml; a difference is a warning."""
    found = f"{len(jar_files('kafka'))} for Kafka, {len(jar_files('spark'))} for Spark"
    if _stamp_fits(JARS / ".trunkline-stamp", PROJECT_ROOT / "conf" / "ivy.xml"):
        return ok(found)
    return warn(f"{found}, but not what conf/ivy.xml says", "run any ./trunkline command")


@CHECKS.add("mosquitto")
def check_mosquitto(_settings: Settings) -> Finding:
    """Check that Mosquitto is installed. Raises TrunklineError, which the doctor shows as a failure, if not."""
    return ok(str(find_mosquitto()))


@CHECKS.add("disk")
def check_disk(settings: Settings) -> Finding:
    """Check that the disk of the data directory has enough free space.

    Less than 5 GiB is a warning, and less than 1 GiB a failure.
    """
    folder = settings.data_path
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.1f} GiB free at {settings.data_path}"
    mend = "make room, or set data_dir to a larger disk"
    if free < _DISK_WARN_BYTES:
        return fail(found, mend) if free < _DISK_FAIL_BYTES else warn(found, mend)
    return ok(found)


def _part_names(settings: Settings) -> list[str]:
    """Return the names of a whole stack's parts. Parts that the stack cannot run here count once each."""
    try:
        return [plan.name for plan in plans_of(settings, ALL_PARTS)]
    except (TrunklineError, SettingsError):
        return list(ALL_PARTS)


@CHECKS.add("memory")
def check_memory(settings: Settings) -> Finding:
    """Check that a stack's memory fits into the limit of the cgroup, and into what is free; else a warning.

    What a running stack uses already counts as free.
    """
    in_use = sum(status.rss_mb or 0 for status in control.part_statuses(settings)) * memory.MIB
    parts = _part_names(settings)
    lacking = memory.shortage(parts, in_use=int(in_use))
    if lacking is not None:
        return warn(lacking, f"see {memory.PAGE}, or run fewer parts: trunkline up --only PARTS")
    limit = memory.memory_limit()
    allowed = "no limit of a cgroup" if limit is None else f"the cgroup allows {limit // memory.MIB} MiB"
    return ok(f"a whole stack needs about {memory.needed_mib(parts)} MiB; {allowed}")


@CHECKS.add("privacy")
def check_data_dir(settings: Settings) -> Finding:
    """Check that other users can open no file or folder of the data directory.

    An open file is a failure, if `trunkline up` can close it. Paths that stay open, such as those of another
    user, are a warning.
    """
    root = settings.data_path
    found = find_open(root)
    if found.files or found.folders:
        return fail(f"other users can open {found} in {root}", "trunkline up closes them")
    if found.left:
        mend = "chmod -R go= them, if they are for nobody else; a secret that others have read needs a new one"
        return warn(f"not private, or not ours: {named(found.left)}", mend)
    return ok(f"{root} is for its owner alone")


@CHECKS.add("keys")
def check_key_file(settings: Settings) -> Finding:
    """Check that the file of the master keys exists and that only its owner can read it.

    A missing file is a warning. A file that others can read is a failure. If the master key comes from the
    environment, the file is not checked.
    """
    if settings.master_key is not None:
        return ok("the master key comes from the environment")
    return private_file(settings.key_file, "trunkline up makes it")


@CHECKS.add("settings")
def check_settings(_settings: Settings) -> Finding:
    """Return an `ok` finding that names the settings file and the environment variables with settings.

    The settings are valid, because every command validates them at its start.
    """
    file = settings_file()
    source = str(file) if file.exists() else "the defaults"
    variables = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    return ok(f"{source}, variables: {', '.join(variables) or 'none'}")


@CHECKS.add("ports")
def check_ports(settings: Settings) -> Finding:
    """Check that each local port of the settings is free or used by this stack; else it is a warning."""
    wanted: list[tuple[str, str, Callable[[Settings], list[int]]]] = [
        (KAFKA, "kafka.bootstrap_servers", kafka_ports),
        (MOSQUITTO, "mqtt.port", lambda s: [mqtt_port(s)]),
        (GATEWAY, "gateway.port", lambda s: [s.gateway.port]),
    ]
    if settings.agent_mcp.port:
        wanted.append((GATEWAY, "agent_mcp.port", lambda s: [s.agent_mcp.port]))
    if settings.dashboard.port:
        wanted.append((GATEWAY, "dashboard.port", lambda s: [s.dashboard.port]))
    found = []
    for part, setting, ports_of in wanted:
        try:
            ports = ports_of(settings)
        except UsageError:
            found.append(f"{part} is elsewhere")
            continue
        for number, port in enumerate(ports, 1):
            name = numbered(part, number)
            if is_started(settings, name):
                found.append(f"{port} is our {name}")
            elif not port_is_free(port):
                taken = f"{port} ({setting}) is taken by {port_owner(port)}"
                return warn(taken, f"end that, or set {setting} to another port")
            else:
                found.append(f"{port} is free")
    return ok(", ".join(found))


@CHECKS.add("listeners")
def check_plain_listeners(settings: Settings) -> Finding:
    """Check that no HTTP port of the gateway accepts tokens without TLS from other machines.

    Such a port is a failure, and a warning if the setting `gateway.allow_plaintext` allows it.
    """
    found = ", ".join(f"{setting} is {host!r}" for setting, host in open_plain_listeners(settings).items())
    if not found:
        return ok("HTTPS, or loopback alone")
    if settings.gateway.allow_plaintext:
        mend = "let only the proxy that does TLS reach it, or set gateway.certfile and gateway.keyfile"
        return warn(f"{found}, in clear: gateway.allow_plaintext is set", mend)
    mend = "./trunkline tls create; or set gateway.allow_plaintext if a proxy in front does TLS"
    return fail(f"{found}, without TLS: the gateway does not start", mend)


@CHECKS.add("certificates")
def check_certificates(settings: Settings) -> Finding:
    """Check that no certificate in use ends within 21 days. One that has ended is a failure."""
    ends = sorted(certificate_ends(settings).items(), key=lambda one: one[1])
    if not ends:
        return ok("none in use")
    path, first = ends[0]
    left = days_left(first)
    if left < 0:
        return fail(f"{path.name} ended on {first:%Y-%m-%d}", _RENEW)
    if left < WARN_DAYS:
        return warn(f"{path.name} ends on {first:%Y-%m-%d}, in {left:.0f} days", _RENEW)
    return ok(f"{len(ends)} certificates; the first to end is {path.name}, on {first:%Y-%m-%d}")
