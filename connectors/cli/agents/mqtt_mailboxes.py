"""The actions `mqtt` and `mqtt-remove` of `trunkline agents`: mailboxes over MQTT (JE-26)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from connectors.cli.shared import hub
from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import AGENT, request_id
from connectors.cli.shared.files import new_private_file
from connectors.terminal.terminal_text import escaped

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_FIELDS: Final = {
    "agent": "agent_name",
    "inbox": "inbox",
    "outbox": "outbox",
    "user": "username",
    "password": "password",
    "secret": "secret",
}
ACTIONS: Final = Actions()


@ACTIONS.add(
    AGENT,
    argument("--out", "write all of it there (new file, 0600); print no secret", type=Path, metavar="FILE"),
    request_id("the same registration, with the same secret"),
    example="trunkline agents mqtt builder --out builder.json",
)
def _mqtt(args: argparse.Namespace, settings: Settings) -> int:
    """Give an agent or a principal its mailbox over MQTT."""
    with new_private_file(args.out, "--out") as file:
        answer = hub.post_named(
            args, settings, "agents", args.name, "mqtt", possible_effect="the agent is registered"
        )
        if file is not None:
            stored = {name: value for name, value in answer.items() if name != "request_id"}
            file.write(json.dumps(stored, indent=2) + "\n")
    note = "The secret is not shown again; it signs what the agent sends. --out FILE keeps it off the screen."
    if args.out is not None:
        for name in ("secret", "password"):
            answer.pop(name, None)
        # The request's id comes last.
        answer = {**answer, "credentials_file": str(args.out), "request_id": answer.pop("request_id")}
        note = f"secret    in {args.out}"
    lines = [f"{label:<9} {escaped(answer[name])}" for label, name in _FIELDS.items() if name in answer]
    return hub.print_answer(args, answer, *lines, note)


@ACTIONS.add(AGENT, example="trunkline agents mqtt-remove builder")
def _mqtt_remove(args: argparse.Namespace, settings: Settings) -> int:
    """End an agent's mailbox over MQTT; the messages in it stay."""
    row = hub.post(settings, "agents", args.name, "mqtt", "remove")
    return hub.print_answer(args, row, f"agent {escaped(args.name)} over MQTT is {escaped(row['status'])}")
