"""The plan by which the stack runs Mosquitto, with its settings file from `conf/`."""

from __future__ import annotations

import math
import resource
from pathlib import Path

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
from connectors.programs.local_stack.data_files import write_from_template
from connectors.programs.local_stack.part_plan import (
    LOOPBACK_NAMES,
    MOSQUITTO,
    PartPlan,
    all_but,
    find_mosquitto,
)
from connectors.programs.local_stack.ports import LOOPBACK, mqtt_answers, require_free
from schemas.settings.settings import Settings
from trunkline_agent.broker import socket_name
from trunkline_agent.errors import UsageError
from trunkline_agent.mqtt.mqtt_tls import mqtt_context

# Connections to Mosquitto's port, and more descriptors for its private socket, its files and its listeners.
_MQTT_CONNECTIONS = 10_000
_MQTT_RESERVE = 256


def mqtt_port(settings: Settings) -> int:
    """Return the port of the stack's Mosquitto, `mqtt.port`.

    Raises:
        UsageError: `mqtt.host` is not on loopback, or the TLS settings are incomplete.
    """
    mqtt = settings.mqtt
    if mqtt.host not in LOOPBACK_NAMES:
        raise UsageError(
            f"mqtt.host is {mqtt.host!r}: the local stack starts a broker on 127.0.0.1. Change it, or leave "
            f"Mosquitto out: up --only {all_but(MOSQUITTO)}"
        )
    if not mqtt.tls:
        if mqtt.listen_host not in LOOPBACK_NAMES:
            raise UsageError(f"mqtt.listen_host is {mqtt.listen_host!r}: without mqtt.tls it must be 127.0.0.1")
    elif mqtt.ca_certs is None:
        raise UsageError(f"mqtt.ca_certs is not set: for mqtt.tls set it to {settings.tls_path / 'ca.crt'}")
    elif mqtt.require_client_cert and mqtt.certfile is None:
        raise UsageError("mqtt.certfile is not set: with mqtt.require_client_cert the stack's clients need it")
    return mqtt.port


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
