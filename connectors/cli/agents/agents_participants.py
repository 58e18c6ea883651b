"""What `trunkline agents` does with agents that take part, and with their keys."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.agents.agent_key_pair import (
    checked_key_file,
    drop_successor,
    new_key_file,
    public_key_in,
    put_in_place,
    successor_of,
)
from connectors.cli.shared.hub_options import named_request
from connectors.cli.shared.hub_rows import Row, checked_name, print_rows
from connectors.cli.shared.text_table import age_of, fields, print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.terminal.terminal_text import escaped
from schemas.errors import BackboneUnreachable, TrunklineError
from schemas.streams.agents.agent_signing import key_id

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_PARTICIPANTS: Final = "participants"


def spawn(args: argparse.Namespace, settings: Settings) -> int:
    """Start an agent."""
    body = {"agent_name": args.name, "task": args.task, "capabilities": args.capability}
    with (
        GatewayClient(settings) as gateway,
        named_request(args.request_id, "the agent was started") as request_id,
    ):
        row = gateway.post(path_of(_PARTICIPANTS, "spawn"), body, request_id=request_id)
    if args.json:
        print_json({**row, "request_id": request_id})
    else:
        print(f"agent  {escaped(row['id'])}")
        print(f"state  {escaped(row['status'])}")
    return 0


def join(args: argparse.Namespace, settings: Settings) -> int:
    """Let an agent take part."""
    name = checked_name(args.name, "an agent")
    public_key = public_key_in(args.key) if args.new_key is None else new_key_file(args.new_key, "--new-key")
    body = {
        "agent_name": name,
        "public_key": public_key,
        "task": args.task,
        "capabilities": args.capability,
    }
    try:
        with (
            GatewayClient(settings) as gateway,
            named_request(args.request_id, "it takes part") as request_id,
        ):
            row = gateway.post(path_of(_PARTICIPANTS), body, request_id=request_id)
    except (BackboneUnreachable, KeyboardInterrupt):
        if args.new_key is not None:
            print(f"The key is in {args.new_key}: name it by --key then", file=sys.stderr, flush=True)
        raise
    except TrunklineError:
        if args.new_key is not None:
            args.new_key.unlink(missing_ok=True)
        raise
    if args.json:
        print_json({**row, "request_id": request_id, "key_file": _text(args.new_key)})
        return 0
    print(f"agent  {escaped(row['id'])}")
    print(f"key    {key_id(public_key)}" + ("" if args.new_key is None else f", in {args.new_key}"))
    return 0


def active(args: argparse.Namespace, settings: Settings) -> int:
    """List who takes part; NotFound when nobody does."""
    wanted = {"status": args.status, "capability": args.capability}
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of(_PARTICIPANTS), wanted)
    found = {"agents": found["participants"]}
    heading = ("AGENT", "STATE", "SINCE", "KEYS", "CAPABILITIES", "TASK")

    def cells(row: Row) -> tuple[object, ...]:
        can = ", ".join(row["capabilities"]) or None
        return row["id"], row["status"], age_of(row["started_at"]), len(row["keys"]), can, row["task"]

    return print_rows(args, found, "agents", heading, cells)


def status(args: argparse.Namespace, settings: Settings) -> int:
    """Show one of them."""
    with GatewayClient(settings) as gateway:
        row = gateway.get(path_of(_PARTICIPANTS, checked_name(args.name, "an agent")))
    return _print_one(args, row)


def stop(args: argparse.Namespace, settings: Settings) -> int:
    """Stop one of them."""
    name = checked_name(args.name, "an agent")
    with GatewayClient(settings) as gateway:
        row = gateway.post(path_of(_PARTICIPANTS, name, "stop"), {"reason": args.reason})
    print_json(row) if args.json else print(f"agent {escaped(name)} is {escaped(row['status'])}")
    return 0


def rotate(args: argparse.Namespace, settings: Settings) -> int:
    """Make a new key, register it, and put it in the old one's place, in this order: whatever breaks off in the
    middle, the file holds a key that is good, and the same command again goes on.
    """
    name = checked_name(args.name, "an agent")
    checked_key_file(args.file)
    public_key = successor_of(args.file)
    with GatewayClient(settings) as gateway:
        try:
            row = _registered(gateway, name, public_key, args.overlap)
        except (BackboneUnreachable, KeyboardInterrupt):
            print(
                "Perhaps the new key is registered: the same command again goes on", file=sys.stderr, flush=True
            )
            raise
        except TrunklineError:
            drop_successor(args.file)
            raise
    put_in_place(args.file)
    return _print_key(args, row, public_key, f", in {args.file}")


def add_key(args: argparse.Namespace, settings: Settings) -> int:
    """Register a further key."""
    name, public_key = checked_name(args.name, "an agent"), public_key_in(args.file)
    with GatewayClient(settings) as gateway:
        row = _registered(gateway, name, public_key, args.overlap)
    return _print_key(args, row, public_key, "")


def remove_key(args: argparse.Namespace, settings: Settings) -> int:
    """Take a key away."""
    name, key = checked_name(args.name, "an agent"), checked_name(args.key_id, "a key")
    with GatewayClient(settings) as gateway:
        row = gateway.post(path_of(_PARTICIPANTS, name, "keys", key, "remove"))
    print_json(row) if args.json else print(f"agent {escaped(name)} has {len(row['keys'])} keys")
    return 0


def _registered(gateway: GatewayClient, name: str, public_key: str, overlap_s: float) -> Row:
    """The agent with its further key. One that it has already, of a rotation that broke off, is as good."""
    found: Row = gateway.get(path_of(_PARTICIPANTS, name))
    if key_id(public_key) in {key["key_id"] for key in found["keys"]}:
        return found
    body = {"public_key": public_key, "overlap_s": round(overlap_s)}
    row: Row = gateway.post(path_of(_PARTICIPANTS, name, "keys"), body)
    return row


def _print_one(args: argparse.Namespace, row: Row) -> int:
    if args.json:
        print_json(row)
        return 0
    keys = [_key_text(key) for key in row["keys"]]
    print(
        fields({**row, "capabilities": ", ".join(row["capabilities"]) or None, "keys": "; ".join(keys) or None})
    )
    return 0


def _print_key(args: argparse.Namespace, row: Row, public_key: str, where: str) -> int:
    if args.json:
        print_json({**row, "key_id": key_id(public_key)})
        return 0
    print(f"agent  {escaped(row['id'])}")
    print(f"key    {key_id(public_key)}{where}")
    for key in row["keys"]:
        if key["valid_until"] is not None:
            print(f"older  {_key_text(key)}")
    return 0


def _key_text(key: dict[str, Any]) -> str:
    until = "" if key["valid_until"] is None else f" until {key['valid_until']}"
    return f"{key['key_id']}{until}"


def _text(found: object) -> str | None:
    return None if found is None else str(found)


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {
    "spawn": spawn,
    "join": join,
    "active": active,
    "status": status,
    "stop": stop,
    "rotate": rotate,
    "add-key": add_key,
    "remove-key": remove_key,
}
