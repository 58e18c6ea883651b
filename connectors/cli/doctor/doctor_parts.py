"""What `trunkline doctor` checks of the stack: brokers, accounts, programs, listeners, views."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from connectors.cli.doctor.doctor_findings import FAIL, OK, RESTART, START, WARN, Finding, private_file
from connectors.dashboard.address import address_of
from connectors.gateway_client.gateway_tls import explained as explained_http
from connectors.gateway_client.gateway_tls import trust
from connectors.local_stack import control
from connectors.local_stack.part_plan import (
    BRIDGE,
    FILES,
    GATEWAY,
    MOSQUITTO,
    STREAMS,
    XML_PUMP,
)
from connectors.local_stack.readiness import mqtt_answers
from connectors.mqtt_link.mqtt_credentials import OPERATOR, load_role_passwords, role_file
from connectors.mqtt_link.mqtt_login import LoginAnswer, try_login
from connectors.mqtt_link.mqtt_tls import explained, mqtt_context
from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.views import VIEW_TABLES

_HTTP_TIMEOUT_S = 5.0


def is_started(settings: Settings, part: str) -> bool:
    """Return whether the stack that runs on this data directory has this part."""
    state = control.running_state(settings)
    return state is not None and part in state["parts"]


def check_mqtt(settings: Settings) -> Finding:
    """An MQTT broker answers."""
    mqtt = settings.mqtt
    where = f"{mqtt.host}:{mqtt.port}"
    context = mqtt_context(mqtt)
    if mqtt_answers(mqtt.host, mqtt.port, timeout_s=2.0, context=context):
        return Finding("mqtt", OK, where if context is None else f"{where}, TLS")
    if context is not None and (why := _why_no_tls(mqtt, context)) is not None:
        return Finding("mqtt", FAIL, f"{where}: {why}", "./trunkline tls create says what to set")
    level, mend = (FAIL, RESTART) if is_started(settings, MOSQUITTO) else (WARN, START)
    return Finding("mqtt", level, f"{where} does not answer", mend)


def _check_part(settings: Settings, name: str) -> Finding:
    status = next((part for part in control.part_statuses(settings) if part.name == name), None)
    if status is None or not is_started(settings, name):
        return Finding(name, WARN, "not started by this stack", START)
    found, why = f"{status.state}, restarts: {status.restarts}", f"trunkline logs {name} says why"
    if status.state != "ready":
        return Finding(name, FAIL, found if status.why is None else f"{found}: {status.why}", why)
    return Finding(name, WARN, found, f"it died before: {why}") if status.restarts else Finding(name, OK, found)


def check_bridge(settings: Settings) -> Finding:
    """The bridge lives."""
    return _check_part(settings, BRIDGE)


def check_files(settings: Settings) -> Finding:
    """The bridge of the file queue lives."""
    return _check_part(settings, FILES)


def check_xml_pump(settings: Settings) -> Finding:
    """Each pump of the stack lives."""
    state = control.running_state(settings) or {"parts": ()}
    names = [name for name in state["parts"] if name == XML_PUMP or name.startswith(f"{XML_PUMP}_")]
    if not names and settings.xml_pump.processes == 0:
        return Finding(XML_PUMP, OK, "none is to run here: xml_pump.processes is 0")
    pumps = [_check_part(settings, name) for name in names or [XML_PUMP]]
    worst = max(pumps, key=lambda pump: (OK, WARN, FAIL).index(pump.level))
    if len(pumps) == 1:
        return worst
    return replace(worst, check=XML_PUMP, found="; ".join(f"{pump.check}: {pump.found}" for pump in pumps))


def _why_no_tls(mqtt: MqttSettings, context: ssl.SSLContext) -> str | None:
    """What stands between us and a broker that is there; None when there is none."""
    try:
        with socket.create_connection((mqtt.host, mqtt.port), timeout=2.0) as plain:
            try:
                context.wrap_socket(plain, server_hostname=mqtt.host).close()
            except OSError as error:
                return explained(error, mqtt)
    except OSError:
        return None
    return "it takes TLS and gives no answer: perhaps it wants mqtt.certfile and mqtt.keyfile"


def check_accounts(settings: Settings) -> Finding:
    """The MQTT broker lets nobody in without an account, and the operator with hers."""
    mqtt, path = settings.mqtt, role_file(settings)
    nobody = try_login(mqtt)
    if nobody is LoginAnswer.SILENT:
        return Finding("accounts", WARN, "the MQTT broker does not answer", START)
    ours = is_started(settings, MOSQUITTO)
    if nobody is LoginAnswer.LET_IN:
        mend = RESTART if ours else "give it a password_file and an acl_file, as conf/mosquitto.conf does"
        return Finding("accounts", FAIL if ours else WARN, "the MQTT broker lets anybody in", mend)
    if not ours or not path.exists():
        return Finding("accounts", OK, "the MQTT broker refuses clients without an account")
    if mqtt.username is not None:
        found = f"mqtt.username is {mqtt.username!r}, but the local broker knows only its own accounts"
        return Finding("accounts", WARN, found, "unset MQTT_USERNAME or TRUNKLINE__MQTT__USERNAME")
    private = private_file("accounts", path)
    if private.level != OK:
        return private
    passwords = load_role_passwords(settings)
    assert passwords is not None  # noqa: S101  it exists, and up is the only one who makes it
    if try_login(mqtt, OPERATOR, passwords[OPERATOR].get_secret_value()) is not LoginAnswer.LET_IN:
        return Finding("accounts", FAIL, f"the MQTT broker refuses the operator's password of {path}", RESTART)
    return Finding("accounts", OK, f"no client without an account; the roles' passwords are in {private.found}")


def check_gateway(settings: Settings) -> Finding:
    """The gateway says that it is ready, and its other listeners can be opened."""
    part = _check_part(settings, GATEWAY)
    url = f"{settings.gateway_url}/readyz"
    # Asked past the proxies of the environment: it is on this machine, or in our own network.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=trust(url, settings.gateway.ca_certs)),
    )
    try:
        opener.open(url, timeout=_HTTP_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        with error:
            found = f"{url}: {error.code} {_message(error.read(10_000))}".rstrip()
        return Finding(GATEWAY, FAIL, found, f"trunkline logs {GATEWAY} says why")
    except OSError as error:
        why = getattr(error, "reason", error)
        # Somebody is there who is not trusted, whoever started it.
        if isinstance(why, ssl.SSLError):
            return Finding(GATEWAY, FAIL, f"{url}: {explained_http(why)}", "./trunkline tls create")
        if not is_started(settings, GATEWAY):
            return part
        return Finding(GATEWAY, FAIL, f"{part.found}, {url}: {why}", f"trunkline logs {GATEWAY} says why")
    if not is_started(settings, GATEWAY):
        return _check_listeners(settings, Finding(GATEWAY, OK, f"{url} answers"), is_ours=False)
    return _check_listeners(settings, replace(part, found=f"{part.found}, {url} answers"), is_ours=True)


def _check_listeners(settings: Settings, gateway: Finding, *, is_ours: bool) -> Finding:
    """What was found of the gateway, or what stands between its other listeners and those who use them. Of a
    gateway that is not ours nobody knows whether they are to be there.
    """
    urls = {"agent_mcp": settings.mcp_server_url} if settings.agent_mcp.port else {}
    if settings.dashboard.port:
        urls["dashboard"] = address_of(settings)
    opened = []
    for section, url in urls.items():
        try:
            _open(url, settings.gateway.ca_certs)
            opened.append(section)
        except ssl.SSLError as error:
            found = f"{section} at {url}: {explained_http(error)}"
            return Finding(GATEWAY, FAIL, found, "./trunkline tls create")
        except OSError as error:
            if is_ours:
                mend = f"trunkline logs {GATEWAY} says why; look at the settings of {section}"
                return Finding(GATEWAY, FAIL, f"{section} at {url}: {error}", mend)
    return replace(gateway, found=", ".join([gateway.found, *(f"{section} is open" for section in opened)]))


def _open(url: str, ca_certs: Path | None) -> None:
    """Connect as those do who use it. Nothing is asked: where agents speak, what nobody has signed is noted in
    the ledger as refused. Raises OSError.
    """
    context, where = trust(url, ca_certs), urlsplit(url)
    port = where.port or (80 if context is None else 443)
    with socket.create_connection((where.hostname, port), timeout=_HTTP_TIMEOUT_S) as plain:
        if context is not None:
            context.wrap_socket(plain, server_hostname=where.hostname).close()


def _message(body: bytes) -> str:
    try:
        found = json.loads(body)
        return ascii(found["message"])[1:301]
    except (ValueError, KeyError, TypeError):
        return ""


def check_token(settings: Settings) -> Finding:
    """The operator's token is there and only ours to read."""
    path = settings.operator_token_file
    if not path.exists():
        return Finding("token", WARN, f"{path} is not there yet", "the gateway makes it at its first start")
    return private_file("token", path)


def check_streams(settings: Settings) -> Finding:
    """The streaming jobs live."""
    return _check_part(settings, STREAMS)


def check_views(settings: Settings) -> Finding:
    """The views' tables are there."""
    if "://" in settings.tables_root:
        return Finding("views", OK, f"below {settings.tables_root}, not looked into")
    missing = [name for name in VIEW_TABLES if not Path(settings.table_path(name), "_delta_log").is_dir()]
    if missing:
        found = f"not there yet: {', '.join(missing)}"
        started = is_started(settings, STREAMS)
        mend = f"trunkline logs {STREAMS} says why, if it stays so" if started else START
        return Finding("views", WARN, found, mend)
    return Finding("views", OK, f"{len(VIEW_TABLES)} tables below {settings.tables_root}")
