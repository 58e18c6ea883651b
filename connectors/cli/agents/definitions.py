"""The actions `list` and `show` of `trunkline agents`: the definitions of agents for tasks."""

from __future__ import annotations

import sys
from typing import Any, Final

from connectors.cli.shared.actions import Actions
from connectors.cli.shared.arguments import AGENT
from connectors.cli.shared.call import Call, Columns
from connectors.cli.shared.text_table import fields
from connectors.terminal.terminal_text import escaped


def _capabilities(row: dict[str, Any]) -> str | None:
    return ", ".join(row["capabilities"]) or None


def _hardened(row: dict[str, Any]) -> str:
    return "yes" if row["hardened"] else "no"


_COLUMNS: Final[Columns] = {
    "AGENT": "name",
    "STATE": "status",
    "IMAGE": "image",
    "HARDENED": _hardened,
    "CAPABILITIES": _capabilities,
    "DESCRIPTION": "description",
}
ACTIONS: Final = Actions()


@ACTIONS.add(example="trunkline agents list --json | jq -r '.agents[].name'")
def _list(call: Call) -> int:
    """List the definitions by name, and on stderr the files that define none."""
    found = call.get("agents")
    if not call.json:
        for file, fault in found["faults"].items():
            print(f"defines no agent: {escaped(file)}: {escaped(fault)}", file=sys.stderr)
    return call.print_rows(found, "agents", _COLUMNS)


@ACTIONS.add(AGENT, example="trunkline agents show echo")
def _show(call: Call) -> int:
    """Show an agent's whole definition."""
    row = call.get("agents", call.name)
    return call.print_answer(
        row, fields({**row, "capabilities": _capabilities(row), "hardened": _hardened(row)})
    )
