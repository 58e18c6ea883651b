"""Makes and revokes the tokens of those who talk to the gateway.

  trunkline principals add ann --role delegator      prints the token, once
  trunkline principals add builder --role worker --token-file builder.token
  trunkline principals list
  trunkline principals revoke ann                    final: the name is not used again

Roles: operator (everything), delegator (register, cancel, watch), worker (pick and read its own), viewer.
A command takes its token from TRUNKLINE_TOKEN, else the operator's from its file below data_dir.
Exit codes: 0; 2 wrong arguments; 3 no such principal; 4 refused; 5 the gateway does not answer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_ROLES = ("operator", "delegator", "worker", "viewer")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = commands.add_parser("add", help="add a principal, print its token once")
    add.add_argument("name", metavar="NAME", help="a worker has the name of its session")
    add.add_argument("--role", required=True, choices=_ROLES)
    add.add_argument(
        "--token-file",
        type=Path,
        metavar="PATH",
        help="write the token there (new file, 0600), do not print it",
    )
    listing = commands.add_parser("list", help="list the principals")
    revoke = commands.add_parser("revoke", help="revoke a principal's token")
    revoke.add_argument("name", metavar="NAME")
    for command in (add, listing, revoke):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    from connectors.cli.shared.text_table import age_of, aligned, print_json
    from connectors.gateway_client.gateway_client import GatewayClient, path_of

    with GatewayClient(settings) as gateway:
        if args.action == "add":
            return _add(args, gateway)
        if args.action == "revoke":
            row = gateway.post(path_of("principals", args.name, "revoke"))
            print_json(row) if args.json else print(f"{args.name} is revoked")
            return 0
        found = gateway.get(path_of("principals"))
    if args.json:
        print_json(found)
        return 0
    rows = [
        (row["principal"], row["role"], row["status"], age_of(row["added_at"]), row["added_by"])
        for row in found["principals"]
    ]
    print(aligned(("PRINCIPAL", "ROLE", "STATE", "AGE", "ADDED BY"), rows))
    return 0


def _add(args: argparse.Namespace, gateway: Any) -> int:
    from connectors.cli.shared.private_file import new_private_file
    from connectors.cli.shared.text_table import print_json
    from connectors.gateway_client.gateway_client import path_of

    with new_private_file(args.token_file, "--token-file") as file:
        made = gateway.post(path_of("principals"), {"principal": args.name, "role": args.role})
        if file is not None:
            file.write(made.pop("token") + "\n")
            made["token_file"] = str(args.token_file)
    if args.json:
        print_json(made)
        return 0
    print(f"principal  {args.name} ({args.role})")
    print(f"token      {made['token'] if file is None else f'in {args.token_file}'}")
    if file is None:
        print("The token is not shown again. Give it on as TRUNKLINE_TOKEN.")
    return 0
