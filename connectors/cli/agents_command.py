"""Lists and shows the agents that tasks can be given to.

  trunkline agents list
  trunkline agents show echo --json

An agent is a JSON file in conf/agents/ where the gateway runs; what changes there is taken up at once. A file
with a fault defines no agent: 'list' names it on stderr, with what is wrong with it.

Exit codes: 0; 2 wrong arguments; 3 no such agent; 4 refused; 5 the gateway does not answer.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schemas.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "list the agents by name, and the files that define none"
    listing = commands.add_parser(
        "list",
        help=text,
        description=text,
        epilog="example: trunkline agents list --json | jq -r '.agents[].name'",
        allow_abbrev=False,
    )
    text = "show all that an agent's definition says"
    show = commands.add_parser(
        "show",
        help=text,
        description=text,
        epilog="example: trunkline agents show echo",
        allow_abbrev=False,
    )
    show.add_argument("name", metavar="NAME", help="the agent, e.g. echo")
    for command in (listing, show):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    from connectors.cli.hub_rows import checked_name
    from connectors.gateway_client import GatewayClient, path_of

    parts = ("agents",) if args.action == "list" else ("agents", checked_name(args.name, "an agent"))
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of(*parts))
    return _print_list(args, found) if args.action == "list" else _print_one(args, found)


def _print_list(args: argparse.Namespace, found: dict[str, Any]) -> int:
    from connectors.cli.hub_rows import print_rows
    from connectors.terminal_text import escaped

    if not args.json:
        for file, fault in found["faults"].items():
            print(f"defines no agent: {escaped(file)}: {escaped(fault)}", file=sys.stderr)
    heading = ("AGENT", "STATE", "IMAGE", "HARDENED", "CAPABILITIES", "DESCRIPTION")
    return print_rows(args, found, "agents", heading, _cells)


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    shown = _shown(row)
    return tuple(shown[name] for name in ("name", "status", "image", "hardened", "capabilities", "description"))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "capabilities": ", ".join(row["capabilities"]) or None,
        "hardened": "yes" if row["hardened"] else "no",
    }


def _print_one(args: argparse.Namespace, row: dict[str, Any]) -> int:
    from connectors.cli.jobs_actions import print_json
    from connectors.cli.text_table import fields

    print_json(row) if args.json else print(fields(_shown(row)))
    return 0
