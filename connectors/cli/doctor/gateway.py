"""Checks of `trunkline doctor` on the gateway, and on what it reports. Each returns a Finding.

The checks of reports look at the gateway that answers. Without a gateway of this stack, nothing is checked.
"""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from connectors.cli.doctor.findings import (
    NO_ANSWER,
    NO_GATEWAY,
    Checks,
    Finding,
    at_the_gateway,
    check_part,
    fail,
    first_of,
    is_started,
    ok,
    private_file,
    warn,
)
from connectors.plumbing.gateway_client.gateway_access import explained, trust
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, attempt, path_of
from connectors.programs.local_stack.part_plan import GATEWAY
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import KafkaSettings, Settings
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.hub.answer_errors import said_in
from trunkline_agent.hub.plans import Answer, Lost, Request
from trunkline_agent.hub.sync_client import HubClient
from trunkline_agent.terminal_text import escaped

CHECKS: Final = Checks()
_TIMEOUT_S: Final = 5.0
# As many as one answer of the gateway has.
_LIMIT: Final = 1000
_APART_S: Final = 5
_CLOCK_GAUGE: Final = "trunkline_log_clock_offset_seconds"
_LONG_LEASE_GAUGE: Final = "trunkline_long_lease_seconds"
_CLOCKS: Final = "let chrony or another NTP client set the clocks of the brokers and of the gateways"


@CHECKS.add(GATEWAY)
def check_gateway(settings: Settings) -> Finding:
    """Check that the gateway is ready, and that its ports for MCP and the dashboard accept connections.

    A gateway that this stack has not started, and that does not answer, is a warning. Any other fault is a
    failure.
    """
    part, is_ours = check_part(settings, GATEWAY), is_started(settings, GATEWAY)
    url, outcome = f"{settings.gateway_url}/readyz", _asked(settings, "/readyz")
    logs = f"trunkline logs {GATEWAY} says why"
    if isinstance(outcome, Answer):
        if not outcome.is_success:
            return fail(f"{url}: {outcome.status} {said_in(outcome.body)[1] or ''}".rstrip(), logs)
        gateway = replace(part, found=f"{part.found}, {url} answers") if is_ours else ok(f"{url} answers")
        return _check_listeners(settings, gateway, is_ours=is_ours)
    # A server answers, but its certificate is not trusted.
    if "[SSL" in outcome.cause:
        return fail(f"{url}: {explained(outcome.cause)}", "./trunkline tls create")
    return fail(f"{part.found}, {url}: {outcome.cause}", logs) if is_ours else part


def _asked(settings: Settings, path: str) -> Answer | Lost:
    """Ask the gateway once, without a token, and return what came of it."""
    hub = HubAccess(settings.gateway_url, None)
    times = {"connect_timeout_s": _TIMEOUT_S, "answer_timeout_s": _TIMEOUT_S}
    with HubClient(hub, settings.gateway.ca_certs, **times) as client:
        return client.run(attempt(Request("GET", path)))


def _samples(settings: Settings, gauge: str) -> list[Any] | None:
    """Return the samples of a gauge in the gateway's metrics. None: it does not answer, or shows none."""
    outcome = _asked(settings, "/metrics")
    if not (isinstance(outcome, Answer) and outcome.is_success):
        return None
    families = text_string_to_metric_families(outcome.body.decode("utf-8", "replace"))
    return [sample for family in families for sample in family.samples if sample.name == gauge]


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
            found = f"{section} at {url}: {explained(error)}"
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
    with socket.create_connection((where.hostname, port), timeout=_TIMEOUT_S) as plain:
        if context is not None:
            context.wrap_socket(plain, server_hostname=where.hostname).close()


@CHECKS.add("token")
def check_token(settings: Settings) -> Finding:
    """Check that the file of the operator's token exists and that only its owner can read it.

    A missing file is a warning. A file that others can read is a failure.
    """
    return private_file(settings.operator_token_file, "the gateway makes it at its first start")


@CHECKS.add("webhooks")
@at_the_gateway
def check_webhooks(gateway: GatewayClient) -> Finding:
    """Check that no webhook is paused, fails or has dead messages; each of these is a warning."""
    return webhooks_finding(gateway.get(path_of("webhooks"), {"limit": _LIMIT})["webhooks"])


def webhooks_finding(webhooks: list[dict[str, Any]]) -> Finding:
    """Return the finding for the webhooks of a gateway's answer: ok, or a warning that names up to three."""
    faults = [fault for one in webhooks if (fault := _fault(one)) is not None]
    if not faults:
        return ok(f"{len(webhooks)} webhooks, none paused or failing")
    return warn(first_of(faults, "; "), "trunkline webhooks list, then: trunkline webhooks test NAME")


def _fault(webhook: dict[str, Any]) -> str | None:
    name = escaped(str(webhook["webhook"]))
    if webhook["status"] == "paused":
        return f"{name} is paused: {escaped(str(webhook['why_paused']))}"
    if webhook["failures_in_a_row"]:
        return (
            f"{name} has failed {webhook['failures_in_a_row']} times: {escaped(str(webhook['last_failure']))}"
        )
    return f"{name} has {webhook['dead']} dead messages" if webhook["dead"] else None


@CHECKS.add("mqtt inboxes")
@at_the_gateway
def check_mqtt_inboxes(gateway: GatewayClient) -> Finding:
    """Check that each agent over MQTT confirms its messages; one that does not is a warning (DL-33)."""
    found = gateway.get_all(path_of("mqtt-agents"), "agents", itemgetter("agent_name"))
    return inboxes_finding(found["agents"])


def inboxes_finding(agents: list[dict[str, Any]]) -> Finding:
    """Return the finding for the agents of a gateway's answer: ok, or a warning that names up to three."""
    silent = [one for one in agents if one["unconfirmed"]]
    if not silent:
        return ok(f"{len(agents)} agents over MQTT, none with messages that it does not confirm")
    said = [f"{escaped(one['agent_name'])} ({one['unconfirmed']} times again)" for one in silent]
    return warn(
        f"messages are published again and not confirmed by {first_of(said, ', ')}",
        "start an agent that is away; other clients must confirm: docs/how-to/publish_from_another_language.md",
    )


@CHECKS.add("handlers")
def check_handlers(settings: Settings) -> Finding:
    """Check that no reader holds a message for longer than `gateway.long_lease_s`, which is a warning.

    A handler that hangs extends its lease, so the message is not handed out again.
    """
    if not is_started(settings, GATEWAY):
        return NO_GATEWAY
    samples = _samples(settings, _LONG_LEASE_GAUGE)
    if samples is None:
        return NO_ANSWER
    if not samples:
        return ok(f"none holds a message for longer than {settings.gateway.long_lease_s:g} s")
    held = sorted(samples, key=lambda one: -one.value)
    named = [
        f"{escaped(one.labels['reader'])} holds a message of {one.labels['mailbox']} for {one.value:.0f} s"
        for one in held
    ]
    return warn(
        first_of(named, "; "),
        "look at the reader, whose handler may hang; when it is ended, the message is handed out again",
    )


@CHECKS.add("clocks")
def check_clocks(settings: Settings) -> Finding:
    """Check that no record of the log is of the future, and that the gateway's clock is that of the log.

    More than five seconds are a warning. A Kafka or a gateway that does not answer is left to its own check.
    """
    offset_s = next((sample.value for sample in _samples(settings, _CLOCK_GAUGE) or ()), 0.0)
    if abs(offset_s) > _APART_S:
        ahead = "behind" if offset_s > 0 else "ahead of"
        return warn(f"the gateway's clock is {abs(offset_s):.0f} s {ahead} that of the log", _CLOCKS)
    try:
        future = future_records(settings.kafka, time.time() + _APART_S)
    except BackboneUnreachable:
        return ok("not looked at: Kafka does not answer")
    if future:
        partition, logged_s = max(future.items(), key=lambda one: one[1])
        when = datetime.fromtimestamp(logged_s, UTC).isoformat(timespec="seconds")
        return warn(
            f"a record of partition {partition} was logged at {when}, which is in the future: the clock of its "
            "broker is wrong, or was when it came",
            _CLOCKS,
        )
    return ok(f"no record of the log and no gateway is more than {_APART_S} s away from this machine's clock")


def future_records(kafka: KafkaSettings, after_s: float) -> dict[int, float]:
    """Return the time of the first record that was logged at `after_s` or later, by partition.

    Times are in seconds since 1970 UTC. Raises BackboneUnreachable if Kafka does not answer.
    """
    with topic_reader(kafka) as consumer:
        wanted = dict.fromkeys(consumer.assignment(), round(after_s * 1000))
        found = consumer.offsets_for_times(wanted)
        return {at.partition: one.timestamp / 1000 for at, one in found.items() if one is not None}
