"""What `trunkline agents mqtt` and `mqtt-remove` do: mailboxes over MQTT (JE-26)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from connectors.cli.shared.hub_options import named_request
from connectors.cli.shared.hub_rows import checked_name
from connectors.cli.shared.private_file import new_private_file
from connectors.cli.shared.text_table import print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.terminal.terminal_text import escaped

if TYPE_CHECKING:
    from schemas.settings.settings import Settings


def register(args: argparse.Namespace, settings: Settings) -> int:
    """Register an agent; its secret goes into a file, or is printed once."""
    name = checked_name(args.name, "an agent")
    with (
        new_private_file(args.out, "--out") as file,
        GatewayClient(settings) as gateway,
        named_request(args.request_id, "the agent is registered") as request_id,
    ):
        told = gateway.post(path_of("agents", name, "mqtt"), request_id=request_id)
        if file is not None:
            file.write(json.dumps(told, indent=2) + "\n")
    if args.out is not None:
        told = {key: value for key, value in told.items() if key not in ("secret", "password")}
        told["credentials_file"] = str(args.out)
    if args.json:
        print_json({**told, "request_id": request_id})
        return 0
    for label, key in (
        ("agent", "agent_name"),
        ("inbox", "inbox"),
        ("outbox", "outbox"),
        ("user", "username"),
        ("password", "password"),
        ("secret", "secret"),
    ):
        if key in told:
            print(f"{label:<9} {escaped(told[key])}")
    if args.out is None:
        print(
            "The secret is not shown again; it signs what the agent sends. --out FILE keeps it off the screen."
        )
    else:
        print(f"secret    in {args.out}")
    return 0


def remove(args: argparse.Namespace, settings: Settings) -> int:
    """End an agent's mailbox over MQTT."""
    name = checked_name(args.name, "an agent")
    with GatewayClient(settings) as gateway:
        row = gateway.post(path_of("agents", name, "mqtt", "remove"))
    print_json(row) if args.json else print(f"agent {escaped(name)} over MQTT is {escaped(row['status'])}")
    return 0


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {
    "mqtt": register,
    "mqtt-remove": remove,
}
