"""What `trunkline agents list` and `show` do: the definitions of agents for tasks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.hub_rows import checked_name, print_rows
from connectors.cli.shared.text_table import fields, print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.terminal.terminal_text import escaped

if TYPE_CHECKING:
    from schemas.settings.settings import Settings


def list_agents(args: argparse.Namespace, settings: Settings) -> int:
    """Print the definitions, and on stderr the files that define none."""
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of("agents"))
    if not args.json:
        for file, fault in found["faults"].items():
            print(f"defines no agent: {escaped(file)}: {escaped(fault)}", file=sys.stderr)
    heading = ("AGENT", "STATE", "IMAGE", "HARDENED", "CAPABILITIES", "DESCRIPTION")
    return print_rows(args, found, "agents", heading, _cells)


def show(args: argparse.Namespace, settings: Settings) -> int:
    """Print one definition."""
    name = checked_name(args.name, "an agent")
    with GatewayClient(settings) as gateway:
        row = gateway.get(path_of("agents", name))
    print_json(row) if args.json else print(fields(_shown(row)))
    return 0


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    shown = _shown(row)
    return tuple(shown[name] for name in ("name", "status", "image", "hardened", "capabilities", "description"))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "capabilities": ", ".join(row["capabilities"]) or None,
        "hardened": "yes" if row["hardened"] else "no",
    }


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {"list": list_agents, "show": show}
