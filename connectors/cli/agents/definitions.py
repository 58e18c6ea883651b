"""The actions `list` and `show` of `trunkline agents`: the definitions of agents for tasks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared import hub
from connectors.cli.shared.actions import Actions
from connectors.cli.shared.arguments import AGENT
from connectors.cli.shared.text_table import fields
from connectors.terminal.terminal_text import escaped

if TYPE_CHECKING:
    from schemas.settings.settings import Settings


def _capabilities(row: dict[str, Any]) -> str | None:
    return ", ".join(row["capabilities"]) or None


def _hardened(row: dict[str, Any]) -> str:
    return "yes" if row["hardened"] else "no"


_COLUMNS: Final[hub.Columns] = {
    "AGENT": "name",
    "STATE": "status",
    "IMAGE": "image",
    "HARDENED": _hardened,
    "CAPABILITIES": _capabilities,
    "DESCRIPTION": "description",
}
ACTIONS: Final = Actions()


@ACTIONS.add(example="trunkline agents list --json | jq -r '.agents[].name'")
def _list(args: argparse.Namespace, settings: Settings) -> int:
    """List the definitions by name, and on stderr the files that define none."""
    found = hub.get(settings, "agents")
    if not args.json:
        for file, fault in found["faults"].items():
            print(f"defines no agent: {escaped(file)}: {escaped(fault)}", file=sys.stderr)
    return hub.print_rows(args, found, "agents", _COLUMNS)


@ACTIONS.add(AGENT, example="trunkline agents show echo")
def _show(args: argparse.Namespace, settings: Settings) -> int:
    """Show an agent's whole definition."""
    row = hub.get(settings, "agents", args.name)
    return hub.print_answer(
        args, row, fields({**row, "capabilities": _capabilities(row), "hardened": _hardened(row)})
    )
