"""What `trunkline organism` does for each action."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.hub_rows import Row, checked_name, print_rows
from connectors.cli.shared.text_table import aligned, print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.out_of_band.client import give_command
from connectors.out_of_band.command_document import (
    Action,
    AddListener,
    GetStatus,
    HotReload,
    ListListeners,
    RemoveListener,
)
from connectors.out_of_band.command_keys import private_key_file, read_keys
from connectors.terminal.terminal_text import escaped
from schemas.errors import NotFound, UsageError

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_SAME_NAMES: Final = (
    "type",
    "capability",
    "root_tag",
    "namespace",
    "handler",
    "model",
    "client",
    "system_prompt",
    "concurrency",
    "per_minute",
    "tokens_per_minute",
)


def show(args: argparse.Namespace, settings: Settings) -> int:
    """List the listeners."""
    wanted = {"status": "removed" if args.removed else None}
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of("listeners"), wanted)
    if found["fault"] is not None:
        print(f"the organism file is not loaded: {escaped(found['fault'])}", file=sys.stderr)
    return _print_listeners(args, found)


def list_listeners(args: argparse.Namespace, settings: Settings) -> int:
    """List the listeners over the command socket."""
    return _print_listeners(args, give_command(settings, ListListeners(), args.key))


def get_status(args: argparse.Namespace, settings: Settings) -> int:
    """Show the numbers of the whole."""
    answer = _given(args, settings, GetStatus())
    if not args.json:
        print(
            f"version {answer['version']}: {answer['listeners']} listeners, {answer['waiting']} messages wait, "
            f"{answer['leased']} are handled"
        )
    return 0


def _print_listeners(args: argparse.Namespace, found: dict[str, Any]) -> int:
    heading = ("LISTENER", "TYPE", "TAKES", "NAMESPACE", "HANDLER", "AT ONCE", "SEES", "CAPABILITY")

    def cells(row: Row) -> tuple[object, ...]:
        tools = row["visible_tools"]
        sees = "all" if tools is None else ", ".join(tools) or "nobody"
        takes = f"<{row['root_tag']}>"
        said = (row["concurrency"], sees, row["capability"] or None)
        return row["listener"], row["type"], takes, row["namespace"] or None, row["handler"], *said

    code = print_rows(args, found, "listeners", heading, cells)
    if not args.json:
        print(f"version {found['version']}")
    return code


def add_listener(args: argparse.Namespace, settings: Settings) -> int:
    """Add one."""
    if args.tools and args.no_tools:
        raise UsageError("give --tool or --no-tools, not both")
    fields: dict[str, Any] = {name: getattr(args, name) for name in _SAME_NAMES}
    fields |= {"name": checked_name(args.name, "a listener"), "timeout_s": args.timeout}
    fields["tools"] = [] if args.no_tools else args.tools
    answer = _given(args, settings, AddListener(fields))
    if not args.json:
        print(f"listener {escaped(answer['listener'])} is there; version {answer['version']}")
    return 0


def remove_listener(args: argparse.Namespace, settings: Settings) -> int:
    """Remove one."""
    answer = _given(args, settings, RemoveListener(checked_name(args.name, "a listener")))
    if not args.json:
        print(
            f"listener {escaped(answer['listener'])} is gone, {answer['pending']} messages go back to their "
            f"senders; version {answer['version']}"
        )
    return 0


def reload(args: argparse.Namespace, settings: Settings) -> int:
    """Read the file again."""
    answer = _given(args, settings, HotReload())
    if not args.json:
        print(f"{answer['listeners']} listeners are loaded; version {answer['version']}")
    return 0


def keys(args: argparse.Namespace, settings: Settings) -> int:
    """List the keys."""
    folder = read_keys(settings.command_keys_path)
    if args.json:
        print_json(
            {
                "folder": str(settings.command_keys_path),
                "keys": [{"name": key.name, "key_id": key.key_id} for key in folder.keys.values()],
                "faults": folder.faults,
            }
        )
        return 0
    if not folder.keys and not folder.faults:
        raise NotFound(f"there are no keys in {settings.command_keys_path}; the gateway makes the first")
    private = private_key_file(settings)
    print(aligned(("NAME", "KEY"), [(key.name, key.key_id) for key in folder.keys.values()]))
    for name, why in folder.faults.items():
        print(f"{escaped(name)} holds no key that counts: {escaped(why)}")
    if private.exists():
        print(f"the operator's private key is {private}")
    return 0


def _given(args: argparse.Namespace, settings: Settings, action: Action) -> dict[str, Any]:
    answer = give_command(settings, action, args.key)
    if args.json:
        print_json(answer)
    return answer


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {
    "show": show,
    "add-listener": add_listener,
    "remove-listener": remove_listener,
    "reload": reload,
    "list-listeners": list_listeners,
    "get-status": get_status,
    "keys": keys,
}
