"""The check of `trunkline doctor` on the inboxes of agents over MQTT (DL-33)."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Final

from connectors.cli.doctor.findings import Checks, Finding, is_started, ok, warn
from connectors.programs.local_stack.part_plan import GATEWAY
from schemas.settings.settings import Settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.terminal_text import escaped

CHECKS: Final = Checks()
_NAMED: Final = 3


@CHECKS.add("mqtt inboxes")
def check_mqtt_inboxes(settings: Settings) -> Finding:
    """Check that each agent over MQTT confirms its messages; one that does not is a warning.

    The bridge reports such agents to the gateway that answers. Without a gateway of this stack, nothing is
    checked.
    """
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of

    if not is_started(settings, GATEWAY):
        return ok("not looked at: no gateway of this data directory runs here")
    try:
        with GatewayClient(settings) as gateway:
            found = gateway.get_all(path_of("mqtt-agents"), "agents", itemgetter("agent_name"))
            return finding_of(found["agents"])
    except TrunklineError:  # the check of the gateway reports this
        return ok("not looked at: the gateway does not answer")


def finding_of(agents: list[dict[str, Any]]) -> Finding:
    """Return the finding for the agents of a gateway's answer: ok, or a warning that names up to three."""
    silent = [one for one in agents if one["unconfirmed"]]
    if not silent:
        return ok(f"{len(agents)} agents over MQTT, none with messages that it does not confirm")
    said = [f"{escaped(one['agent_name'])} ({one['unconfirmed']} times again)" for one in silent[:_NAMED]]
    more = f", and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
    return warn(
        f"messages are published again and not confirmed by {', '.join(said)}{more}",
        "start an agent that is away; other clients must confirm: docs/how-to/publish_from_another_language.md",
    )
