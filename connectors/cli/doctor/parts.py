"""Checks of the stack's parts: MQTT broker, accounts, bridges, gateway, XML pump."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from connectors.cli.doctor.findings import (
    FAIL,
    OK,
    RESTART,
    START,
    WARN,
    Checks,
    Finding,
    fail,
    is_started,
    ok,
    private_file,
    warn,
)
from connectors.dashboard.address import address_of
from connectors.gateway_client.gateway_tls import explained as explained_http
from connectors.gateway_client.gateway_tls import trust
from connectors.local_stack import control
from connectors.local_stack.part_plan import BRIDGE, FILES, GATEWAY, MOSQUITTO, XML_PUMP
from connectors.local_stack.readiness import mqtt_answers
from connectors.mqtt_link.mqtt_credentials import OPERATOR, load_role_passwords, role_file
from connectors.mqtt_link.mqtt_login import LoginAnswer, try_login
from connectors.mqtt_link.mqtt_tls import explained, mqtt_context
from schemas.settings.settings import MqttSettings, Settings

_HTTP_TIMEOUT_S = 5.0
CHECKS = Checks()


@CHECKS.add("mqtt")
def check_mqtt(settings: Settings) -> Finding:
    """Check that the MQTT broker answers."""
    mqtt = settings.mqtt
    where = f"{mqtt.host}:{mqtt.port}"
    context = mqtt_context(mqtt)
    if mqtt_answers(mqtt.host, mqtt.port, timeout_s=2.0, context=context):
        return ok(where if context is None else f"{where}, TLS")
    if context is not None and (why := _why_no_tls(mqtt, context)) is not None:
        return fail(f"{where}: {why}", "./trunkline tls create says what to set")
    found = f"{where} does not answer"
    return fail(found, RESTART) if is_started(settings, MOSQUITTO) else warn(found, START)


def check_part(settings: Settings, part: str) -> Finding:
    """Check that a part of the stack runs."""
    status = next((status for status in control.part_statuses(settings) if status.name == part), None)
    if status is None or not is_started(settings, part):
        return warn("not started by this stack", START)
    found, why = f"{status.state}, restarts: {status.restarts}", f"trunkline logs {part} says why"
    if status.state != "ready":
        return fail(found if status.why is None else f"{found}: {status.why}", why)
    return warn(found, f"it died before: {why}") if status.restarts else ok(found)


def _why_no_tls(mqtt: MqttSettings, context: ssl.SSLContext) -> str | None:
    """Return why the TLS connection fails; None when no broker is there."""
    try:
        with socket.create_connection((mqtt.host, mqtt.port), timeout=2.0) as plain:
            try:
                context.wrap_socket(plain, server_hostname=mqtt.host).close()
            except OSError as error:
                return explained(error, mqtt)
    except OSError:
        return None
    return "it takes TLS and gives no answer: perhaps it wants mqtt.certfile and mqtt.keyfile"


@CHECKS.add("accounts")
def check_accounts(settings: Settings) -> Finding:
    """Check that the MQTT broker refuses clients without an account, and takes the operator's."""
    mqtt, path = settings.mqtt, role_file(settings)
    nobody = try_login(mqtt)
    if nobody is LoginAnswer.SILENT:
        return warn("the MQTT broker does not answer", START)
    ours = is_started(settings, MOSQUITTO)
    if nobody is LoginAnswer.LET_IN:
        mend = RESTART if ours else "give it a password_file and an acl_file, as conf/mosquitto.conf does"
        found = "the MQTT broker lets anybody in"
        return fail(found, mend) if ours else warn(found, mend)
    if not ours or not path.exists():
        return ok("the MQTT broker refuses clients without an account")
    if mqtt.username is not None:
        found = f"mqtt.username is {mqtt.username!r}, but the local broker knows only its own accounts"
        return warn(found, "unset MQTT_USERNAME or TRUNKLINE__MQTT__USERNAME")
    private = private_file(path)
    if private.level != OK:
        return private
    passwords = load_role_passwords(settings)
    assert passwords is not None  # noqa: S101  the file exists, and only `up` writes it
    if try_login(mqtt, OPERATOR, passwords[OPERATOR].get_secret_value()) is not LoginAnswer.LET_IN:
        return fail(f"the MQTT broker refuses the operator's password of {path}", RESTART)
    return ok(f"no client without an account; the roles' passwords are in {private.found}")


for _bridge in (BRIDGE, FILES):
    CHECKS.add(_bridge)(partial(check_part, part=_bridge))


@CHECKS.add(GATEWAY)
def check_gateway(settings: Settings) -> Finding:
    """Check that the gateway is ready, and that its other listeners can be opened."""
    part = check_part(settings, GATEWAY)
    url = f"{settings.gateway_url}/readyz"
    # Without the proxies of the environment: the gateway is on this machine, or in our own network.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=trust(url, settings.gateway.ca_certs)),
    )
    try:
        opener.open(url, timeout=_HTTP_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        with error:
            found = f"{url}: {error.code} {_message(error.read(10_000))}".rstrip()
        return fail(found, f"trunkline logs {GATEWAY} says why")
    except OSError as error:
        why = getattr(error, "reason", error)
        # A server answers, but its certificate is not trusted.
        if isinstance(why, ssl.SSLError):
            return fail(f"{url}: {explained_http(why)}", "./trunkline tls create")
        if not is_started(settings, GATEWAY):
            return part
        return fail(f"{part.found}, {url}: {why}", f"trunkline logs {GATEWAY} says why")
    if not is_started(settings, GATEWAY):
        return _check_listeners(settings, ok(f"{url} answers"), is_ours=False)
    return _check_listeners(settings, replace(part, found=f"{part.found}, {url} answers"), is_ours=True)


def _check_listeners(settings: Settings, gateway: Finding, *, is_ours: bool) -> Finding:
    """Return the finding of the gateway with its open listeners, or why one cannot be opened.

    A gateway that this stack did not start (not `is_ours`) need not have them.
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
            return fail(found, "./trunkline tls create")
        except OSError as error:
            if is_ours:
                mend = f"trunkline logs {GATEWAY} says why; look at the settings of {section}"
                return fail(f"{section} at {url}: {error}", mend)
    return replace(gateway, found=", ".join([gateway.found, *(f"{section} is open" for section in opened)]))


def _open(url: str, ca_certs: Path | None) -> None:
    """Open a connection as a client does. Raises OSError.

    No request is sent, because the ledger would record an unsigned request as refused.
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


@CHECKS.add("token")
def check_token(settings: Settings) -> Finding:
    """Check that the operator's token exists and that only the owner can read it."""
    path = settings.operator_token_file
    if not path.exists():
        return warn(f"{path} is not there yet", "the gateway makes it at its first start")
    return private_file(path)


@CHECKS.add(XML_PUMP)
def check_xml_pump(settings: Settings) -> Finding:
    """Check that each pump of the stack runs."""
    state = control.running_state(settings) or {"parts": ()}
    names = [name for name in state["parts"] if name == XML_PUMP or name.startswith(f"{XML_PUMP}_")]
    if not names and settings.xml_pump.processes == 0:
        return ok("none is to run here: xml_pump.processes is 0")
    pumps = [replace(check_part(settings, name), check=name) for name in names or [XML_PUMP]]
    worst = max(pumps, key=lambda pump: (OK, WARN, FAIL).index(pump.level))
    if len(pumps) == 1:
        return worst
    return replace(worst, found="; ".join(f"{pump.check}: {pump.found}" for pump in pumps))
