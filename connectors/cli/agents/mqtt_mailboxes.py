"""The actions `mqtt` and `mqtt-remove` of `trunkline agents`: mailboxes over MQTT (JE-26)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import AGENT, request_id
from connectors.cli.shared.call import Call
from connectors.cli.shared.files import new_private_file
from connectors.terminal.terminal_text import escaped

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
def _mqtt(call: Call) -> int:
    """Give an agent or a principal its mailbox over MQTT."""
    with new_private_file(call.out, "--out") as file:
        answer = call.post_named("agents", call.name, "mqtt", possible_effect="the agent is registered")
        if file is not None:
            stored = {name: value for name, value in answer.items() if name != "request_id"}
            file.write(json.dumps(stored, indent=2) + "\n")
    note = "The secret is not shown again; it signs what the agent sends. --out FILE keeps it off the screen."
    if call.out is not None:
        for name in ("secret", "password"):
            answer.pop(name, None)
        # The request's id comes last.
        answer = {**answer, "credentials_file": str(call.out), "request_id": answer.pop("request_id")}
        note = f"secret    in {call.out}"
    lines = [f"{label:<9} {escaped(answer[name])}" for label, name in _FIELDS.items() if name in answer]
    return call.print_answer(answer, *lines, note)


@ACTIONS.add(AGENT, example="trunkline agents mqtt-remove builder")
def _mqtt_remove(call: Call) -> int:
    """End an agent's mailbox over MQTT; the messages in it stay."""
    row = call.post("agents", call.name, "mqtt", "remove")
    return call.print_answer(row, f"agent {escaped(call.name)} over MQTT is {escaped(row['status'])}")
