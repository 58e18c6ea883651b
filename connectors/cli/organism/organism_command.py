"""Shows which listeners the XML pump has, and changes them by signed commands.

  trunkline organism show                             the listeners, and the version of the organism
  trunkline organism add-listener adder --handler my_handlers.calculator:add
  trunkline organism remove-listener adder            answers once it gets no messages any more
  trunkline organism reload                           reads conf/organism.yaml and the handlers' modules again
  trunkline organism list-listeners                   as show, over the socket and without a token
  trunkline organism get-status                       how many listeners there are and messages wait
  trunkline organism keys                             the keys whose commands are accepted here

Commands do not use the hub's port: they go to a Unix socket on the gateway's machine, signed with the
operator's key (keys/commands/operator.pem below the data directory) or with the key of --key. Each command is
accepted once. 'show' asks the hub and needs a token.

Exit codes: 0; 2 wrong arguments; 3 no such listener; 4 refused; 5 no gateway answers.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from connectors.cli.shared.actions import Actions, argument, flag
from connectors.cli.shared.arguments import name_of, path
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.text_output import aligned
from trunkline_agent.errors import NotFound, UsageError
from trunkline_agent.terminal_text import escaped

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


def _visible(row: Row) -> str:
    tools = row["visible_tools"]
    return "all" if tools is None else ", ".join(tools) or "nobody"


_COLUMNS: Final[Columns] = {
    "LISTENER": "listener",
    "TYPE": "type",
    "TAKES": lambda row: f"<{row['root_tag']}>",
    "NAMESPACE": lambda row: row["namespace"] or None,
    "HANDLER": "handler",
    "AT ONCE": "concurrency",
    "SEES": _visible,
    "CAPABILITY": lambda row: row["capability"] or None,
}
_KEY: Final = path("--key", "sign with this private key (default: the operator's)", "FILE")
ACTIONS: Final = Actions()


@ACTIONS.add(
    flag("--removed", "list the removed listeners instead"),
    example="trunkline organism show --json | jq -r '.listeners[].listener'",
)
def _show(call: Call) -> int:
    """List the listeners by name, and what each of them takes."""
    status = "removed" if call.removed else None
    found = call.get_all("listeners", key="listeners", name="listener", status=status)
    if found["fault"] is not None:
        print(f"the organism file is not loaded: {escaped(found['fault'])}", file=sys.stderr)
    return _print_listeners(call, found)


@ACTIONS.add(_KEY, example="trunkline organism list-listeners --json")
def _list_listeners(call: Call) -> int:
    """List the listeners over the command socket, without a token."""
    return _print_listeners(call, _give(call, "ListListeners"))


def _give(call: Call, command: str, *fields: object) -> dict[str, Any]:
    """Send a command, a class of `signed_commands` with these fields, and return the gateway's answer."""
    # Imported here, because lxml is slow to import and help must be quick.
    from connectors.doors.out_of_band import client, signed_commands

    return client.give_command(call.settings, getattr(signed_commands, command)(*fields), call.key)


def _do(call: Call, text: str, command: str, *fields: object) -> int:
    """Send a command as `_give` does, and print the text with the fields of the answer."""
    answer = _give(call, command, *fields)
    return call.print_answer(answer, text.format_map({k: escaped(str(v)) for k, v in answer.items()}))


def _print_listeners(call: Call, found: dict[str, Any]) -> int:
    code = call.print_rows(found, "listeners", _COLUMNS)
    if not call.json:
        print(f"version {found['version']}")
    return code


@ACTIONS.add(_KEY, example="trunkline organism get-status")
def _get_status(call: Call) -> int:
    """Show how many listeners there are, and how many messages wait and are handled."""
    text = "version {version}: {listeners} listeners, {waiting} messages wait, {leased} are handled"
    return _do(call, text, "GetStatus")


@ACTIONS.add(
    argument("name", "its name; no principal, agent or listener may have it", type=name_of("a listener")),
    argument("--handler", "the function, where the pumps can import it", metavar="MODULE:NAME"),
    argument("--type", "a function (default), a person, a language model", choices=("handler", "human", "llm")),
    argument("--capability", "what it can do, for listeners that see it", metavar="TEXT"),
    argument("--root-tag", "the payload's element; of an llm and a human", metavar="TAG"),
    argument("--namespace", "the payload's namespace; of an llm and a human", metavar="URI"),
    argument(
        "--tool",
        "a listener that it sees; may be repeated (default: all)",
        dest="tools",
        action="append",
        metavar="NAME",
    ),
    flag("--no-tools", "it sees no listener"),
    argument("--concurrency", "how many messages at once (default: 8)", type=int, metavar="N"),
    argument("--per-minute", "how many messages a minute", type=int, metavar="N"),
    argument("--tokens-per-minute", "of an llm", type=int, metavar="N"),
    argument("--timeout", "for one message (default: 30)", type=float, metavar="SECONDS"),
    argument("--model", "of an llm", metavar="NAME"),
    argument("--client", "the client of the model", metavar="MODULE:NAME"),
    argument("--system-prompt", "of an llm", metavar="TEXT"),
    _KEY,
    example="trunkline organism add-listener adder --handler my_handlers.calculator:add --concurrency 4",
)
def _add_listener(call: Call) -> int:
    """Add a listener; root tag and namespace are those of the class that its handler takes."""
    if call.tools and call.no_tools:
        raise UsageError("give --tool or --no-tools, not both")
    fields: dict[str, Any] = {name: getattr(call, name) for name in _SAME_NAMES}
    fields |= {"name": call.name, "timeout_s": call.timeout, "tools": [] if call.no_tools else call.tools}
    return _do(call, "listener {listener} is there; version {version}", "AddListener", fields)


@ACTIONS.add(
    argument("name", "the listener", type=name_of("a listener")),
    _KEY,
    example="trunkline organism remove-listener adder",
)
def _remove_listener(call: Call) -> int:
    """Remove a listener: waiting messages go back to their senders, started ones are finished."""
    text = "listener {listener} is gone, {pending} messages go back to their senders; version {version}"
    return _do(call, text, "RemoveListener", call.name)


@ACTIONS.add(_KEY, example="trunkline organism reload")
def _reload(call: Call) -> int:
    """Read conf/organism.yaml again: these listeners and no others; imports the handlers anew."""
    return _do(call, "{listeners} listeners are loaded; version {version}", "HotReload")


@ACTIONS.add(example="trunkline organism keys")
def _keys(call: Call) -> int:
    """List the keys whose commands are accepted, and the files in their folder that hold none."""
    from connectors.doors.out_of_band.signed_commands import private_key_file, read_keys

    place = call.settings.command_keys_path
    folder = read_keys(place)
    rows = [(key.name, key.key_id) for key in folder.keys.values()]
    keys = [{"name": name, "key_id": key_id} for name, key_id in rows]
    answer = {"folder": str(place), "keys": keys, "faults": folder.faults}
    if not (call.json or keys or folder.faults):
        raise NotFound(f"there are no keys in {place}; the gateway makes the first")
    private = private_key_file(call.settings)
    faults = [f"{escaped(file)} holds no valid key: {escaped(why)}" for file, why in folder.faults.items()]
    ours = [f"the operator's private key is {private}"] if private.exists() else []
    return call.print_answer(answer, aligned(("NAME", "KEY"), rows), *faults, *ours)
