"""The check that all doors are closed, for commands that need the log to themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from schemas.errors import Refused

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

# The parts of the stack that append nothing by themselves.
_BROKERS: Final = {"kafka", "mosquitto"}


def check_doors_closed(settings: Settings) -> None:
    """Raise Refused while a door of this machine is open, or a gateway answers elsewhere.

    This needs no token; but a token file that cannot be used is a UsageError.
    """
    from connectors.gateway_client.gateway_client import GatewayClient
    from connectors.local_stack.control import running_state

    state = running_state(settings)
    is_open = sorted(set(state["parts"]) - _BROKERS) if state is not None else []
    if is_open:
        raise Refused(
            f"the doors are open: {', '.join(is_open)} run; close them first: "
            "./trunkline down; ./trunkline up --only kafka"
        )
    with GatewayClient(settings) as gateway:
        answers = gateway.answers()
    if answers:
        raise Refused(f"a gateway answers at {settings.gateway_url}: stop it first")
