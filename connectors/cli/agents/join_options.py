"""The options of `trunkline agents join --credentials`, and its help."""

from __future__ import annotations

import argparse
from typing import Final

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import broker_address
from connectors.cli.shared.call import Call
from trunkline_agent.errors import UsageError

MCP, HUB, MQTT = DOORS = ("mcp", "hub", "mqtt")
"""The doors of a credentials file, in the order in which they are opened."""
ROLES: Final = ("worker", "delegator")


def _doors(text: str) -> tuple[str, ...]:
    wanted = {name.strip() for name in text.split(",")}
    if not wanted <= set(DOORS):
        raise argparse.ArgumentTypeError(f"expected some of hub,mqtt,mcp, found {text!r}")
    return tuple(door for door in DOORS if door in wanted)


CREDENTIALS_OPTIONS: Final = (
    argument("--doors", "some of hub,mqtt,mcp (default: those of the stack)", type=_doors, metavar="LIST"),
    argument("--role", "of its token: worker (default) or delegator, which registers jobs", choices=ROLES),
    flag("--replace", "FILE may exist; what it has of this agent is kept"),
    argument("--hub-url", "the hub's address for the agent (default: that of the settings)", metavar="URL"),
    argument("--broker", "the MQTT broker's address for the agent", type=broker_address, metavar="HOST[:PORT]"),
    argument("--mcp-url", "the agent MCP server's address for the agent", metavar="URL"),
)
JOIN_HELP: Final = """\
examples:
  trunkline agents join builder --credentials builder.json
  trunkline agents join builder --credentials builder.json --hub-url http://hub.example:3200 --doors hub
  trunkline agents join builder --new-key builder.pem

With --credentials: the file has a token for the hub, the secret for MQTT, the private key for MCP, and the
addresses. The library 'trunkline-agent' and its command read it. A command that broke off goes on when it is
given again: until then its state is in a hidden file beside FILE. The options behind --request-id belong to it.
"""
_NAMES: Final = ("doors", "role", "replace", "hub_url", "broker", "mcp_url")


def check_no_credentials_options(call: Call) -> None:
    """Raise UsageError if a command without `--credentials` has an option that belongs to it."""
    if given := [f"--{name.replace('_', '-')}" for name in _NAMES if getattr(call, name)]:
        raise UsageError(f"{', '.join(given)}: only with --credentials")
