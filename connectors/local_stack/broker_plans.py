"""The plans of the two brokers: Kafka (one node) and Mosquitto. Their settings files come from `conf/`."""

from __future__ import annotations

import base64
import getpass
import math
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from string import Template

from connectors.local_stack.part_plan import KAFKA, MOSQUITTO, PartPlan
from connectors.local_stack.ports import LOOPBACK, free_port, require_free
from connectors.local_stack.programs import find_java, find_mosquitto, jar_files
from connectors.local_stack.readiness import kafka_answers, mqtt_answers
from connectors.mqtt_credentials import ensure_role_passwords
from connectors.mqtt_password_file import ACL, PASSWORDS, PID, read_lines, with_roles, write_lines
from schemas.errors import TrunklineError, UsageError
from schemas.settings import PROJECT_ROOT, Settings

_LOOPBACK_NAMES = {"127.0.0.1", "localhost"}
_FORMAT_TIMEOUT_S = 60


def write_from_template(template: str, target: Path, values: Mapping[str, object]) -> None:
    """Fill in `conf/<template>` and write it."""
    text = Template((PROJECT_ROOT / "conf" / template).read_text(encoding="utf-8")).substitute(values)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def kafka_port(settings: Settings) -> int:
    """The port of the local broker; refuses addresses that are not one broker on loopback."""
    host, _, port = settings.kafka.bootstrap_servers.rpartition(":")
    if host not in _LOOPBACK_NAMES or not port.isdigit():
        raise UsageError(
            f"kafka.bootstrap_servers is {settings.kafka.bootstrap_servers!r}: the local stack starts one "
            "broker on 127.0.0.1. Set it to 127.0.0.1:PORT, or leave Kafka out: "
            "up --only bridge,gateway,streams"
        )
    return int(port)


def mqtt_port(settings: Settings) -> int:
    """The port of the local MQTT broker; refuses a broker elsewhere and TLS."""
    if settings.mqtt.host not in _LOOPBACK_NAMES or settings.mqtt.tls:
        raise UsageError(
            f"mqtt.host is {settings.mqtt.host!r}, mqtt.tls is {settings.mqtt.tls}: the local stack starts a "
            "broker on 127.0.0.1 without TLS. Change them, or leave it out: "
            "up --only kafka,bridge,gateway,streams"
        )
    return settings.mqtt.port


def _java_command(settings: Settings) -> list[str]:
    jars = ":".join(map(str, jar_files("kafka")))
    return [
        str(find_java()),
        "-Xms128m",
        f"-Xmx{settings.kafka.heap_mb}m",
        # Small heap, few cores: the simple collector and the quick compiler start faster and need less. The
        # other compiler is at work for minutes, and everybody waits for it, up to 150 ms at a time.
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={PROJECT_ROOT / 'conf' / 'log4j2.properties'}",
        "-cp",
        jars,
    ]


def _format_storage(settings: Settings, properties: Path) -> None:
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # Kafka's tools read a leading dash as an option.
    cluster = "k" + cluster[1:] if cluster.startswith("-") else cluster
    command = [*_java_command(settings), "-XX:TieredStopAtLevel=1", "kafka.tools.StorageTool", "format"]
    done = subprocess.run(  # noqa: S603 the command is ours
        [*command, "--ignore-formatted", "-t", cluster, "-c", str(properties)],
        capture_output=True,
        text=True,
        timeout=_FORMAT_TIMEOUT_S,
    )
    if done.returncode:
        raise TrunklineError(
            f"Kafka's storage could not be formatted: {(done.stderr or done.stdout).strip()[-800:]}"
        )


def kafka_plan(settings: Settings) -> PartPlan:
    """Kafka, with its data below `data_dir/kafka`."""
    port = kafka_port(settings)
    home = settings.data_path / "kafka"
    properties = home / "server.properties"

    def prepare() -> None:
        require_free(port, "kafka.bootstrap_servers")
        values = {
            "port": port,
            # Nobody else needs to know the controller's port, so it is another one at each start.
            "controller_port": free_port(),
            "log_dir": home / "log",
            "partitions": settings.kafka.partitions,
            "record_limit_bytes": settings.kafka.record_limit_bytes,
        }
        write_from_template("kafka.properties", properties, values)
        if not (home / "log" / "meta.properties").exists():
            _format_storage(settings, properties)

    def ensure_topic() -> None:
        from connectors.kafka_topic import ensure_topic as ensure

        ensure(settings)

    return PartPlan(
        name=KAFKA,
        summary=f"Kafka on {LOOPBACK}:{port}",
        prepare=prepare,
        command=lambda: [*_java_command(settings), "kafka.Kafka", str(properties)],
        is_ready=lambda: kafka_answers(LOOPBACK, port),
        on_first_ready=ensure_topic,
        ready_within_s=60,
        stop_within_s=20,
        cwd=home,
    )


def accounts_dir(settings: Settings) -> Path:
    """Where the local Mosquitto has its password file, its ACL and its process id."""
    return settings.mqtt.accounts_dir or settings.data_path / "mosquitto" / "accounts"


def _prepare_accounts(settings: Settings) -> None:
    """The ACL, and a password file with the roles' accounts; those of jobs stay as the gateway left them."""
    folder = accounts_dir(settings)
    prefix = settings.mqtt.topic_prefix
    if not prefix.isprintable():
        raise UsageError("mqtt.topic_prefix has a control character, which an ACL file cannot hold")
    write_from_template("mosquitto.acl", folder / ACL, {"prefix": prefix})
    roles = {role: found.get_secret_value() for role, found in ensure_role_passwords(settings).items()}
    known = read_lines(folder / PASSWORDS)
    wanted = with_roles(known, roles)
    # The gateway may write it at the same moment: only touched when something is wrong.
    if wanted != known:
        write_lines(folder / PASSWORDS, wanted.values())
    (folder / ACL).chmod(0o600)
    (folder / PID).unlink(missing_ok=True)


def mosquitto_plan(settings: Settings) -> PartPlan:
    """Mosquitto, with its saved messages and its accounts below `data_dir/mosquitto`."""
    port = mqtt_port(settings)
    home = settings.data_path / "mosquitto"
    conf = home / "mosquitto.conf"

    def prepare() -> None:
        require_free(port, "mqtt.port")
        values = {
            "port": port,
            # Started by root it would become another user, who cannot write below our data directory.
            "user": getpass.getuser(),
            "data_dir": home,
            "accounts_dir": accounts_dir(settings),
            "session_expiry_h": max(1, math.ceil(settings.mqtt.session_expiry_s / 3600)),
            "inflight": settings.mqtt.bridge_inflight,
        }
        _prepare_accounts(settings)
        write_from_template("mosquitto.conf", conf, values)

    return PartPlan(
        name=MOSQUITTO,
        summary=f"Mosquitto on {LOOPBACK}:{port}",
        prepare=prepare,
        command=lambda: [str(find_mosquitto()), "-c", str(conf)],
        is_ready=lambda: mqtt_answers(LOOPBACK, port),
        ready_within_s=15,
        stop_within_s=10,
        cwd=home,
    )
