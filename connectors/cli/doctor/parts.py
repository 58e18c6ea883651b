"""Checks of `trunkline doctor` on the stack's parts. Each returns a Finding: ok, or a fault and its repair."""

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
from connectors.plumbing.gateway_client.gateway_tls import explained as explained_http
from connectors.plumbing.gateway_client.gateway_tls import trust
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, load_role_passwords, role_file
from connectors.programs.local_stack import control, memory
from connectors.programs.local_stack.part_plan import BRIDGE, GATEWAY, KAFKA, MOSQUITTO, XML_PUMP
from connectors.programs.local_stack.ports import mqtt_answers
from schemas.settings.kafka_settings import missing_login
from schemas.settings.settings import MqttSettings, Settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.mqtt.mqtt_login import LoginAnswer, try_login
from trunkline_agent.mqtt.mqtt_tls import explained, mqtt_context
from trunkline_agent.terminal_text import escaped

_HTTP_TIMEOUT_S = 5.0
_CONNECT_S = 2.0
_MEND = "the listeners of the log stay; correct the file, then: trunkline organism reload"
CHECKS = Checks()


@CHECKS.add("kafka")
def check_kafka(settings: Settings) -> Finding:
    """Check that Kafka answers within 2 s, and that the topic has the partitions and epoch of the settings.

    A Kafka that does not answer is a failure if this stack has started it, else a warning. A missing or wrong
    topic is a failure.
    """
    # Imported here, because Kafka's clients are slow to import and help must be quick.
    from schemas.log_access.event_topic import TopicMissingError, check_topic, reach_kafka

    where = settings.kafka.bootstrap_servers
    try:
        reach_kafka(settings.kafka, timeout_s=2.0)
    except TrunklineError as error:
        return fail(str(error), RESTART) if is_started(settings, KAFKA) else warn(str(error), START)
    try:
        count = check_topic(settings)
    except TopicMissingError as error:
        return fail(str(error), "./trunkline log create")
    except TrunklineError as error:
        return fail(str(error), "the message says what to change")
    found = f"{where}, topic {settings.kafka.topic} with {settings.kafka.partitions} partitions"
    if count > settings.kafka.partitions:
        surplus = f"{found}; Kafka has {count}, and the added ones stay empty and do no harm"
        return warn(surplus, f"leave kafka.partitions at {settings.kafka.partitions}: Kafka cannot remove them")
    return ok(found)


@CHECKS.add("login")
def check_login(settings: Settings) -> Finding:
    """Check that clients log in to Kafka, by SASL or a client certificate; otherwise it is a warning.

    Only the settings are read. No connection is made.
    """
    kafka = settings.kafka
    unsafe = missing_login(kafka.security_protocol, kafka.ssl_certfile)
    if unsafe is None:
        return ok(f"{kafka.security_protocol} as {kafka.sasl_username}")
    return warn(f"unsafe: {unsafe}", "see docs/how-to/use_your_own_kafka_and_spark.md")


@CHECKS.add("replicas")
def check_replicas(settings: Settings) -> Finding:
    """Check that the topic has as many replicas as the settings want, and that all are in sync.

    A difference is a warning, and so is a Kafka that does not answer. It is a failure if Kafka refuses records
    because too few replicas are in sync.
    """
    from connectors.log.kafka_topic import replication
    from schemas.log_access.event_topic import reach_kafka

    kafka = settings.kafka
    try:
        reach_kafka(kafka, timeout_s=2.0)
        found = replication(kafka)
    except TrunklineError:
        return warn("not looked at: see the check of kafka")
    what = f"{found.replicas} of each partition, {found.min_in_sync} must have a record before it counts"
    if found.missing:
        where = ", ".join(f"partition {number}: {in_sync}" for number, in_sync in found.missing.items())
        what = f"{what}; in sync are only: {where}"
        if found.refusing:
            return fail(f"{what}; Kafka refuses records", "start the missing brokers")
        return warn(what, "start the missing brokers: kafka-topics --describe names them")
    if found.replicas < kafka.replication_factor:
        return warn(
            f"{what}; kafka.replication_factor is {kafka.replication_factor}",
            "raise the topic's replicas with kafka-reassign-partitions, or lower the setting",
        )
    if found.min_in_sync != kafka.wanted_in_sync_replicas:
        return warn(
            f"{what}; the settings want {kafka.wanted_in_sync_replicas}",
            f"kafka-configs --alter --entity-type topics --entity-name {kafka.topic} --add-config "
            f"min.insync.replicas={kafka.wanted_in_sync_replicas}",
        )
    return ok(what)


@CHECKS.add("mqtt")
def check_mqtt(settings: Settings) -> Finding:
    """Check that the MQTT broker answers within 2 s.

    No answer is a failure if this stack has started the broker, else a warning. A failing TLS connection is a
    failure.
    """
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
    """Check that the part `part` of the stack, such as `bridge`, runs and is ready.

    A part that was not started, or was restarted after it had ended, is a warning. A part that is not ready is
    a failure.
    """
    status = next((status for status in control.part_statuses(settings) if status.name == part), None)
    if status is None or not is_started(settings, part):
        return warn("not started by this stack", START)
    found, why = f"{status.state}, restarts: {status.restarts}", f"trunkline logs {part} says why"
    if status.memory_kills:
        found += f", of these {status.memory_kills} because the kernel killed it for memory"
        why = f"give the stack more memory: {memory.PAGE}"
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
    """Check that the MQTT broker refuses clients without an account, and accepts the operator's account.

    At the stack's own broker, a fault is a failure. At another broker, or without an answer, it is a warning.
    """
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


CHECKS.add(BRIDGE)(partial(check_part, part=BRIDGE))


@CHECKS.add(GATEWAY)
def check_gateway(settings: Settings) -> Finding:
    """Check that the gateway is ready, and that its ports for MCP and the dashboard accept connections.

    A gateway that this stack has not started, and that does not answer, is a warning. Any other fault is a
    failure.
    """
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
    is_ours = is_started(settings, GATEWAY)
    gateway = replace(part, found=f"{part.found}, {url} answers") if is_ours else ok(f"{url} answers")
    return _check_listeners(settings, gateway, is_ours=is_ours)


def _check_listeners(settings: Settings, gateway: Finding, *, is_ours: bool) -> Finding:
    """Return the finding of the gateway with its open listeners, or why one cannot be opened.

    A gateway that this stack did not start (not `is_ours`) need not have them.
    """
    urls = {"agent_mcp": settings.mcp_server_url} if settings.agent_mcp.port else {}
    if settings.dashboard.port:
        urls["dashboard"] = settings.dashboard_url
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
    """Check that the file of the operator's token exists and that only its owner can read it.

    A missing file is a warning. A file that others can read is a failure.
    """
    return private_file(settings.operator_token_file, "the gateway makes it at its first start")


@CHECKS.add(XML_PUMP)
def check_xml_pump(settings: Settings) -> Finding:
    """Check that each process of the XML pump in the stack runs and is ready.

    The finding has the worst level of all processes, see `check_part`. Without a process, it is a warning,
    unless the setting `xml_pump.processes` is 0.
    """
    state = control.running_state(settings) or {"parts": ()}
    names = [name for name in state["parts"] if name == XML_PUMP or name.startswith(f"{XML_PUMP}_")]
    if not names and settings.xml_pump.processes == 0:
        return ok("none is to run here: xml_pump.processes is 0")
    pumps = {name: check_part(settings, name) for name in names or [XML_PUMP]}
    worst = max(pumps.values(), key=lambda pump: (OK, WARN, FAIL).index(pump.level))
    if len(pumps) == 1:
        return worst
    return replace(worst, found="; ".join(f"{name}: {pump.found}" for name, pump in pumps.items()))


@CHECKS.add("organism")
def check_organism(settings: Settings) -> Finding:
    """Check that conf/organism.yaml and its handlers can be loaded, here and by the gateway that runs.

    A file or handler that cannot be loaded is a failure. Without the file, or without a running gateway, there
    is no fault. The check blocks for a second or two, because a child process imports the handlers.
    """
    from connectors.hub.organism.organism_file import OrganismError, check_agents, load_organism, organism_path

    file, path = settings.xml_pump.organism_file, organism_path(settings)
    if path is None:
        return ok(f"{file or 'no file'} is not there: listeners come by commands alone")
    try:
        found = load_organism(path)
        check_agents(settings, path, [listener.name for listener in found.listeners])
    except OrganismError as error:
        return fail(str(error), _MEND)
    if (fault := _fault_at_the_gateway(settings)) is not None:
        return fail(f"the gateway has not loaded {file}: {fault}", _MEND)
    return ok(f"{len(found.listeners)} listeners in {file}")


def _fault_at_the_gateway(settings: Settings) -> str | None:
    """Return the gateway's error for the file; None without an error or a gateway."""
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of

    if not is_started(settings, GATEWAY):
        return None
    try:
        with GatewayClient(settings) as gateway:
            fault = gateway.get(path_of("listeners"))["fault"]
    except TrunklineError:  # the check of the gateway reports this
        return None
    return None if fault is None else escaped(str(fault))


@CHECKS.add("commands")
def check_commands(settings: Settings) -> Finding:
    """Check that the gateway accepts signed commands on its Unix socket, and that all key files are valid.

    Without a running gateway, or with an invalid key file, it is a warning. A socket without a server is a
    failure.
    """
    from connectors.doors.out_of_band.command_keys import read_keys
    from trunkline_agent.unix_address import address_of

    path, folder = settings.command_socket, settings.command_keys_path
    if not is_started(settings, GATEWAY):
        return warn("no gateway of this data directory runs here", "trunkline up starts it")
    keys = read_keys(folder)
    if keys.faults:
        name, why = next(iter(keys.faults.items()))
        return warn(f"{folder}: {name}: {why}", "correct or remove it")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, address_of(path) as address:
            client.settimeout(_CONNECT_S)
            client.connect(address)
    except OSError as error:
        return fail(f"{path}: {error.strerror or error}", f"trunkline logs {GATEWAY} says why")
    return ok(f"{path}, keys: {', '.join(key.name for key in keys.keys.values())}")
