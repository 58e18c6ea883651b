"""The stack that clients are checked against: one that runs already, or one of the kit's own."""

from __future__ import annotations

import shutil
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from connectors.plumbing.gateway_client.gateway_access import read_token, read_token_file, trust
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.programs.local_stack import LocalStack
from connectors.programs.local_stack.part_plan import BRIDGE, GATEWAY, KAFKA, MOSQUITTO
from connectors.tools.demo.stage_stack import own_settings
from schemas.settings.settings import Settings
from trunkline_agent.errors import UsageError
from trunkline_agent.mqtt.mqtt_tls import mqtt_context

OWN_PARTS: Final = (KAFKA, MOSQUITTO, BRIDGE, GATEWAY)


class Target:
    """A stack that runs: its hub, the operator's token, and its MQTT broker.

    Args:
        settings: The settings with the addresses of hub and broker.
        operator_token: The operator's token. The kit adds and revokes principals with it.
    """

    def __init__(self, settings: Settings, operator_token: str) -> None:
        self.settings = settings
        self._operator_token = operator_token

    def hub(self, token: str | None = None) -> GatewayClient:
        """Return a client of the hub with a token; None: the operator's. The caller closes it."""
        return GatewayClient(self.settings, token=self._operator_token if token is None else token)

    def hub_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for connections to the hub, None for plain HTTP."""
        return trust(self.settings.gateway_url, self.settings.gateway.ca_certs)

    def mqtt_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for connections to the broker, None without TLS."""
        return mqtt_context(self.settings.mqtt)


def named_target(settings: Settings, hub: str, token_file: Path | None) -> Target:
    """Return the stack at an address. Its MQTT broker is that of the settings.

    Args:
        settings: The settings.
        hub: The address of the hub.
        token_file: The file with the operator's token. None: that of the settings.

    Raises:
        UsageError: There is no token, or the address is invalid.
        BackboneUnreachable: The hub does not answer.
    """
    changed = {"url": hub, **({} if token_file is None else {"operator_token_file": token_file})}
    used = settings.model_copy(update={"gateway": settings.gateway.model_copy(update=changed)})
    token = read_token(used) if token_file is None else read_token_file(token_file)
    if token is None:
        raise UsageError(
            f"there is no token in {used.operator_token_file}; name a file with --operator-token-file"
        )
    target = Target(used, token)
    with target.hub() as operator:
        operator.check()
    return target


@contextmanager
def own_target(settings: Settings) -> Iterator[Target]:
    """Start a stack on free ports and with a temporary data directory, and stop it at the end of the block.

    Raises TrunklineError if a part does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="trunkline-conformance-"))
    try:
        used = own_settings(settings, folder)
        with LocalStack(used, parts=OWN_PARTS):
            # Not from the environment, whose token is for another stack.
            yield Target(used, read_token_file(used.operator_token_file) or "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
