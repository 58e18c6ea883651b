"""The check of `trunkline doctor` on readers that hold messages for too long. It returns a Finding."""

from __future__ import annotations

from typing import Final

from connectors.cli.doctor.findings import Checks, Finding, is_started, ok, warn
from connectors.programs.local_stack.part_plan import GATEWAY
from schemas.settings.settings import Settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.terminal_text import escaped

CHECKS: Final = Checks()
_METRIC: Final = "trunkline_long_lease_seconds"
_NAMED: Final = 3


@CHECKS.add("handlers")
def check_handlers(settings: Settings) -> Finding:
    """Check that no reader holds a message for longer than `gateway.long_lease_s`, which is a warning.

    A handler that hangs extends its lease, so the message is not handed out again. The figures are those of the
    gateway that answers. Without a gateway of this stack, nothing is checked.
    """
    if not is_started(settings, GATEWAY):
        return ok("not looked at: no gateway of this data directory runs here")
    try:
        found = long_leases(settings)
    except TrunklineError:  # the check of the gateway reports this
        return ok("not looked at: the gateway does not answer")
    if not found:
        return ok(f"none holds a message for longer than {settings.gateway.long_lease_s:g} s")
    named = (
        f"{escaped(reader)} holds a message of {mailbox} for {held_s:.0f} s"
        for mailbox, reader, held_s in found
    )
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return warn(
        "; ".join(list(named)[:_NAMED]) + more,
        "look at the reader, whose handler may hang; when it is ended, the message is handed out again",
    )


def long_leases(settings: Settings) -> list[tuple[str, str, float]]:
    """Return mailbox, reader and seconds of messages that are held for too long, the longest first.

    Raises:
        TrunklineError: The gateway does not answer, or shows no metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families

    from connectors.plumbing.gateway_client.gateway_client import GatewayClient
    from trunkline_agent.hub.plans import Request, Retries, exchange

    with GatewayClient(settings) as gateway, gateway.new_hub() as hub:
        answer = hub.run(exchange(Request("GET", "/metrics"), Retries(patience_s=0.0)))
    families = text_string_to_metric_families(answer.body.decode("utf-8", "replace"))
    samples = [sample for family in families for sample in family.samples if sample.name == _METRIC]
    found = [(one.labels["mailbox"], one.labels["reader"], one.value) for one in samples]
    return sorted(found, key=lambda one: -one[2])
