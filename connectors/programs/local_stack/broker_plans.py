"""The plans by which the stack runs Kafka (one node) and Mosquitto, with their settings files from `conf/`."""

from __future__ import annotations

import base64
import math
import os
import resource
import secrets
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from string import Template

from connectors.doors.mqtt_accounts.mosquitto_files import (
    PASSWORDS,
    PID,
    check_prefixes,
    read_lines,
    with_roles,
    write_acl,
    write_lines,
)
from connectors.plumbing.mqtt_link.broker_settings import ensure_role_passwords, socket_dir
from connectors.plumbing.tls_keys.tls_files import check_server_key
from connectors.programs.local_stack.java_programs import find_java
from connectors.programs.local_stack.kafka_login import (
    PLAINTEXT,
    InternalListener,
    check_local_login,
    ensure_password,
    ensure_scram_user,
)
from connectors.programs.local_stack.part_plan import (
    ALL_PARTS,
    JVM_LOCALE,
    KAFKA,
    MOSQUITTO,
    PartPlan,
    find_mosquitto,
    jar_files,
)
from connectors.programs.local_stack.ports import LOOPBACK, free_port, kafka_answers, mqtt_answers, require_free
from schemas.log_access.kafka_clients import kafka_context
from schemas.settings.settings import PROJECT_ROOT, Settings
from trunkline_agent.broker import socket_name
from trunkline_agent.errors import TrunklineError, UsageError
from trunkline_agent.mqtt.mqtt_tls import mqtt_context
from trunkline_agent.private_files import replace_file

_LOOPBACK_NAMES = {"127.0.0.1", "localhost"}
# The format takes three seconds of processor time; on a busy machine that may be minutes.
_FORMAT_TIMEOUT_S = 600
# Connections to Mosquitto's port, and more descriptors for its private socket, its files and its listeners.
_MQTT_CONNECTIONS = 10_000
_MQTT_RESERVE = 256


def write_from_template(target: Path, values: Mapping[str, object], *templates: str) -> None:
    """Fill in template files of `conf/` and write them, one after the other, as one file with mode 0600.

    The file is replaced, because it may contain a password, and an earlier version's file may be readable by
    others.

    Args:
        target: The file to write.
        values: A value for each `$name` in the templates. A missing one raises KeyError.
        templates: Names of files in `conf/`.
    """
    text = "".join((PROJECT_ROOT / "conf" / name).read_text(encoding="utf-8") for name in templates)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, Template(text).substitute(values).encode())


def java_property(text: str) -> str:
    """Return `text` as a value in a file of Java properties: in ASCII, with escapes (java.util.Properties)."""
    escaped = text.replace("\\", "\\\\").encode("utf-16-be")
    units = (int.from_bytes(escaped[at : at + 2], "big") for at in range(0, len(escaped), 2))
    return "".join(chr(unit) if 0x20 <= unit < 0x7F else f"\\u{unit:04x}" for unit in units)


def _all_but(part: str) -> str:
    return ",".join(name for name in ALL_PARTS if name != part)


def kafka_port(settings: Settings) -> int:
    """Return the port of the stack's Kafka, from `kafka.bootstrap_servers`.

    Raises:
        UsageError: The address is not on loopback.
    """
    host, _, port = settings.kafka.bootstrap_servers.rpartition(":")
    if host not in _LOOPBACK_NAMES or not port.isdigit():
        raise UsageError(
            f"kafka.bootstrap_servers is {settings.kafka.bootstrap_servers!r}: the local stack starts one "
            "broker on 127.0.0.1. Set it to 127.0.0.1:PORT. Or leave Kafka out, and create the topic first: "
            f"./trunkline log create, then up --only {_all_but(KAFKA)}"
        )
    return int(port)


def mqtt_port(settings: Settings) -> int:
    """Return the port of the stack's Mosquitto, `mqtt.port`.

    Raises:
        UsageError: `mqtt.host` is not on loopback, or the TLS settings are incomplete.
    """
    mqtt = settings.mqtt
    if mqtt.host not in _LOOPBACK_NAMES:
        raise UsageError(
            f"mqtt.host is {mqtt.host!r}: the local stack starts a broker on 127.0.0.1. Change it, or leave "
            f"Mosquitto out: up --only {_all_but(MOSQUITTO)}"
        )
    if not mqtt.tls:
        if mqtt.listen_host not in _LOOPBACK_NAMES:
            raise UsageError(f"mqtt.listen_host is {mqtt.listen_host!r}: without mqtt.tls it must be 127.0.0.1")
    elif mqtt.ca_certs is None:
        raise UsageError(f"mqtt.ca_certs is not set: for mqtt.tls set it to {settings.tls_path / 'ca.crt'}")
    elif mqtt.require_client_cert and mqtt.certfile is None:
        raise UsageError("mqtt.certfile is not set: with mqtt.require_client_cert the stack's clients need it")
    return mqtt.port


def _java_command(settings: Settings) -> list[str]:
    jars = ":".join(map(str, jar_files("kafka")))
    return [
        str(find_java()),
        "-Xms128m",
        f"-Xmx{settings.kafka.heap_mb}m",
        # For a small heap and few cores the simple collector starts faster and uses less.
        "-XX:+UseSerialGC",
        # All of its threads exist when the part is ready, see `idle_threads` of the plan.
        "-XX:-UseDynamicNumberOfCompilerThreads",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={PROJECT_ROOT / 'conf' / 'log4j2.properties'}",
        "-cp",
        jars,
    ]


def _format_storage(settings: Settings, properties: Path) -> None:
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # Kafka's tools take a leading dash for an option.
    cluster = "k" + cluster[1:] if cluster.startswith("-") else cluster
    command = [*_java_command(settings), "-XX:TieredStopAtLevel=1", "kafka.tools.StorageTool", "format"]
    done = subprocess.run(  # noqa: S603 the command is ours
        [*command, "--ignore-formatted", "-t", cluster, "-c", properties.name],
        cwd=properties.parent,
        env=os.environ | JVM_LOCALE,
        capture_output=True,
        text=True,
        timeout=_FORMAT_TIMEOUT_S,
    )
    if done.returncode:
        raise TrunklineError(
            f"Kafka's storage could not be formatted: {(done.stderr or done.stdout).strip()[-800:]}"
        )


def kafka_plan(settings: Settings) -> PartPlan:
    """Return the plan by which the stack runs Kafka, with its data below `data_dir/kafka`.

    After Kafka's first start, the plan creates the SCRAM user of the settings (not for PLAINTEXT) and the
    topic.

    Raises:
        UsageError: The settings name a Kafka or a login that the stack cannot run.
    """
    port = kafka_port(settings)
    check_local_login(settings)
    protocol = settings.kafka.security_protocol
    home = settings.data_path / "kafka"
    properties = home / "server.properties"
    internal = InternalListener(port=0, password="")

    def prepare() -> None:
        nonlocal internal
        require_free(port, "kafka.bootstrap_servers")
        ensure_password(settings)
        internal = InternalListener(free_port(), secrets.token_urlsafe())
        values = {
            "port": port,
            "controller_port": free_port(),
            "internal_port": internal.port,
            "broker_password": internal.password,
            "tls_dir": java_property(str(settings.tls_path.absolute())),
            "partitions": settings.kafka.partitions,
            "record_limit_bytes": settings.kafka.record_limit_bytes,
        }
        listeners = f"kafka-{protocol.lower().replace('_', '-')}.properties"
        write_from_template(properties, values, "kafka.properties", listeners)
        if not (home / "log" / "meta.properties").exists():
            _format_storage(settings, properties)

    def ensure_topic() -> None:
        from connectors.log.kafka_topic import ensure_topic as ensure
        from schemas.log_access.event_topic import LogLostError, LogUnfinishedError

        if protocol != PLAINTEXT:
            ensure_scram_user(settings, internal)
        # Kafka itself is ready, and a rebuild of the log needs it. The programs that need the log refuse to
        # start.
        with suppress(LogLostError, LogUnfinishedError):
            ensure(settings)

    return PartPlan(
        name=KAFKA,
        summary=f"Kafka on {LOOPBACK}:{port}",
        prepare=prepare,
        command=lambda: [*_java_command(settings), "kafka.Kafka", properties.name],
        is_ready=lambda: kafka_answers(LOOPBACK, port, context=kafka_context(settings.kafka)),
        on_first_ready=ensure_topic,
        stop_within_s=20,
        cwd=home,
        environment=JVM_LOCALE,
        # Java's second compiler saves a third of Kafka's time. It works for minutes after the start, and would
        # delay requests by up to 150 ms each.
        idle_threads="C2 Comp",
    )


def accounts_dir(settings: Settings) -> Path:
    """Return the folder with the password file, the ACL file and the process id of the stack's Mosquitto.

    It is `mqtt.accounts_dir`, or a folder of the data directory if that is not set. It may not exist yet.
    """
    return settings.mqtt.accounts_dir or settings.data_path / "mosquitto" / "accounts"


def _prepare_accounts(settings: Settings) -> None:
    """Write the ACL, and a password file with the roles' accounts.

    The accounts of jobs and agents, which the gateway manages, are kept.
    """
    folder = accounts_dir(settings)
    check_prefixes(settings.mqtt)
    roles = {role: found.get_secret_value() for role, found in ensure_role_passwords(settings).items()}
    known = read_lines(folder / PASSWORDS)
    wanted = with_roles(known, roles)
    # The gateway may write the file at the same moment, so it is changed only if necessary.
    if wanted != known:
        write_lines(folder / PASSWORDS, wanted.values())
    write_acl(folder, settings.mqtt, wanted)
    (folder / PID).unlink(missing_ok=True)


def _mqtt_listener(settings: Settings) -> str:
    """Return the lines of `mosquitto.conf` for its listener. With TLS there is no other one."""
    mqtt = settings.mqtt
    bound = ["use_username_as_clientid true"] if mqtt.user_is_client_id else []
    if not mqtt.tls:
        return "\n".join([f"listener {mqtt.port} {LOOPBACK}", *bound])
    files = {name: settings.tls_path / name for name in ("ca.crt", "mosquitto.crt", "mosquitto.key")}
    missing = [str(path) for path in files.values() if not path.exists()]
    if missing:
        raise UsageError(f"mqtt.tls is set, but {missing[0]} is missing: run ./trunkline tls create")
    check_server_key(files["mosquitto.key"])
    lines = [
        f"listener {mqtt.port} {mqtt.listen_host}",
        f"cafile {files['ca.crt']}",
        f"certfile {files['mosquitto.crt']}",
        f"keyfile {files['mosquitto.key']}",
        "tls_version tlsv1.3",
        # A certificate allows the connection. User name and password still identify the client.
        f"require_certificate {'true' if mqtt.require_client_cert else 'false'}",
        *bound,
    ]
    return "\n".join(lines)


def _descriptors() -> int:
    """Return the number of descriptors for Mosquitto, within this process's hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = _MQTT_CONNECTIONS + _MQTT_RESERVE
    return wanted if hard == resource.RLIM_INFINITY else max(_MQTT_RESERVE + 1, min(wanted, hard))


def mosquitto_plan(settings: Settings) -> PartPlan:
    """Return the plan by which the stack runs Mosquitto, with its data below `data_dir/mosquitto`.

    Raises:
        UsageError: `mqtt.host` is not on loopback, or the TLS settings are incomplete.
    """
    port = mqtt_port(settings)
    home = socket_dir(settings)
    descriptors = _descriptors()
    conf = home / "mosquitto.conf"

    def prepare() -> None:
        require_free(port, "mqtt.port")
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)  # its socket is for this user alone
        for left in home.glob("*.sock"):
            left.unlink()
        values = {
            "listener": _mqtt_listener(settings),
            "max_connections": descriptors - _MQTT_RESERVE,
            # Relative to its working folder: a socket's whole path may be too long.
            "socket": socket_name(port),
            "accounts_dir": accounts_dir(settings),
            "session_expiry_h": max(1, math.ceil(settings.mqtt.session_expiry_s / 3600)),
            "inflight": settings.mqtt.bridge_read_ahead,
        }
        _prepare_accounts(settings)
        write_from_template(conf, values, "mosquitto.conf")

    def is_ready() -> bool:
        answers = mqtt_answers(settings.mqtt.host, port, context=mqtt_context(settings.mqtt))
        if answers:
            # Mosquitto sets the mode to 770, whatever the umask.
            (home / socket_name(port)).chmod(0o600)
        return answers

    return PartPlan(
        name=MOSQUITTO,
        summary=f"Mosquitto on {LOOPBACK}:{port}",
        prepare=prepare,
        # Enough descriptors for its connections, whatever the soft limit of this process.
        command=lambda: ["prlimit", f"--nofile={descriptors}:", str(find_mosquitto()), "-c", str(conf)],
        is_ready=is_ready,
        stop_within_s=10,
        cwd=home,
    )


BROKER_PLANS = {KAFKA: kafka_plan, MOSQUITTO: mosquitto_plan}
