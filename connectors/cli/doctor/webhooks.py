"""The check of `trunkline doctor` on webhooks. It returns a Finding: ok, or a fault and its repair."""

from __future__ import annotations

from typing import Any, Final

from connectors.cli.doctor.findings import Checks, Finding, is_started, ok, warn
from connectors.programs.local_stack.part_plan import GATEWAY
from schemas.settings.settings import Settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.terminal_text import escaped

CHECKS: Final = Checks()
# As many as one answer of the gateway has.
_LIMIT: Final = 1000
_NAMED: Final = 3


@CHECKS.add("webhooks")
def check_webhooks(settings: Settings) -> Finding:
    """Check that no webhook is paused, fails or has dead messages; each of these is a warning.

    The calls are those of the gateway that answers. Without a gateway of this stack, nothing is checked.
    """
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of

    if not is_started(settings, GATEWAY):
        return ok("not looked at: no gateway of this data directory runs here")
    try:
        with GatewayClient(settings) as gateway:
            found = gateway.get(path_of("webhooks"), {"limit": _LIMIT})
    except TrunklineError:  # the check of the gateway reports this
        return ok("not looked at: the gateway does not answer")
    return finding_of(found["webhooks"])


def finding_of(webhooks: list[dict[str, Any]]) -> Finding:
    """Return the finding for the webhooks of a gateway's answer: ok, or a warning that names up to three."""
    faults = [fault for one in webhooks if (fault := _fault(one)) is not None]
    if not faults:
        return ok(f"{len(webhooks)} webhooks, none paused or failing")
    more = f", and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
    return warn(
        "; ".join(faults[:_NAMED]) + more, "trunkline webhooks list, then: trunkline webhooks test NAME"
    )


def _fault(webhook: dict[str, Any]) -> str | None:
    name = escaped(str(webhook["webhook"]))
    if webhook["status"] == "paused":
        return f"{name} is paused: {escaped(str(webhook['why_paused']))}"
    if webhook["failures_in_a_row"]:
        return (
            f"{name} has failed {webhook['failures_in_a_row']} times: {escaped(str(webhook['last_failure']))}"
        )
    return f"{name} has {webhook['dead']} dead messages" if webhook["dead"] else None
