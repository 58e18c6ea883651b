"""The actions of `trunkline agents` for agents that take part, and for their keys."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from connectors.cli.shared.actions import Actions, argument, one_of
from connectors.cli.shared.arguments import AGENT, OVERLAP, ROTATION, name_of, request_id
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.text_table import age_of, fields
from connectors.terminal.terminal_text import escaped
from schemas.errors import BackboneUnreachable, TrunklineError

_PARTICIPANTS: Final = "participants"
_STATES: Final = ("initializing", "idle", "working", "blocked", "stopped")
_CAPABILITY: Final = argument(
    "--capability", "a capability of it; may be repeated", action="append", default=[], metavar="NAME"
)
ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("task", "what it is to do"),
    argument("--name", "its name (default: one is made)"),
    request_id("the same agent, not a second one"),
    _CAPABILITY,
    example='trunkline agents spawn "sum up the mail" --capability mail',
)
def _spawn(call: Call) -> int:
    """Start an agent with a key of its own, and wait until it runs."""
    path, effect = (_PARTICIPANTS, "spawn"), "the agent was started"
    body = {"agent_name": call.name, "task": call.task, "capabilities": call.capability}
    row = call.post_named(*path, possible_effect=effect, **body)
    return call.print_answer(row, f"agent  {escaped(row['id'])}", f"state  {escaped(row['status'])}")


@ACTIONS.add(
    AGENT,
    one_of(
        argument("--new-key", "make a pair, the private key in FILE (0600)", type=Path, metavar="FILE"),
        argument("--key", "its key in PEM; of a private one, the public half", type=Path, metavar="FILE"),
        required=True,
    ),
    argument("--task", "what it does", metavar="TEXT"),
    request_id("the same agent"),
    _CAPABILITY,
    example="trunkline agents join builder --new-key builder.pem",
)
def _join(call: Call) -> int:
    """Admit an agent that runs elsewhere and signs by itself ('trunkline mcp agent')."""
    from connectors.cli.agents.agent_key_pair import new_key_file, public_key_in
    from schemas.streams.agents.agent_signing import key_id

    new_key: Path | None = call.new_key
    public_key = public_key_in(call.key) if new_key is None else new_key_file(new_key, "--new-key")
    agent = {"agent_name": call.name, "task": call.task, "capabilities": call.capability}
    effect = "the agent was admitted"
    try:
        row = call.post_named(_PARTICIPANTS, possible_effect=effect, public_key=public_key, **agent)
    except (BackboneUnreachable, KeyboardInterrupt):
        if new_key is not None:
            print(f"The key is in {new_key}: name it by --key then", file=sys.stderr, flush=True)
        raise
    except TrunklineError:
        if new_key is not None:
            new_key.unlink(missing_ok=True)
        raise
    file = None if new_key is None else str(new_key)
    where = "" if file is None else f", in {file}"
    lines = (f"agent  {escaped(row['id'])}", f"key    {key_id(public_key)}{where}")
    return call.print_answer({**row, "key_file": file}, *lines)


_COLUMNS: Final[Columns] = {
    "AGENT": "id",
    "STATE": "status",
    "SINCE": lambda row: age_of(row["started_at"]),
    "KEYS": lambda row: len(row["keys"]),
    "CAPABILITIES": lambda row: ", ".join(row["capabilities"]) or None,
    "TASK": "task",
}


@ACTIONS.add(
    argument("--status", "only these (default: all but the stopped ones)", choices=_STATES),
    argument("--capability", "only agents with this capability", metavar="NAME"),
    example="trunkline agents active --capability count",
)
def _active(call: Call) -> int:
    """List the agents that take part, by name."""
    found = call.get(_PARTICIPANTS, status=call.status, capability=call.capability)
    return call.print_rows({"agents": found["participants"]}, "agents", _COLUMNS)


@ACTIONS.add(AGENT, example="trunkline agents status mailer")
def _status(call: Call) -> int:
    """Show one agent that takes part or did, and its keys."""
    row = call.get(_PARTICIPANTS, call.name)
    keys = "; ".join(_key_text(key) for key in row["keys"]) or None
    return call.print_answer(
        row, fields({**row, "capabilities": ", ".join(row["capabilities"]) or None, "keys": keys})
    )


@ACTIONS.add(
    AGENT,
    argument("--reason", "the reason, kept with the agent", metavar="TEXT"),
    example="trunkline agents stop mailer --reason 'all is done'",
)
def _stop(call: Call) -> int:
    """Stop an agent that takes part."""
    row = call.post(_PARTICIPANTS, call.name, "stop", reason=call.reason)
    return call.print_answer(row, f"agent {escaped(call.name)} is {escaped(row['status'])}")


@ACTIONS.add(*ROTATION, example="trunkline agents rotate builder builder.pem")
def rotate(call: Call) -> int:
    """Replace the key in FILE by a new one; the old one stays valid for a while.

    The new key is made, then registered, then put in the old one's place. So the file always holds a valid key,
    wherever the command is interrupted, and the same command again goes on.
    """
    from connectors.cli.agents import agent_key_pair as key_files

    key_files.checked_key_file(call.file)
    public_key = key_files.successor_of(call.file)
    try:
        row = _register_key(call, public_key)
    except (BackboneUnreachable, KeyboardInterrupt):
        text = "The new key may be registered already: the same command again goes on"
        print(text, file=sys.stderr, flush=True)
        raise
    except TrunklineError:
        key_files.drop_successor(call.file)
        raise
    key_files.put_in_place(call.file)
    return _print_key(call, row, public_key, f", in {call.file}")


@ACTIONS.add(
    AGENT,
    argument("file", "in PEM; of a private key, the public half", type=Path),
    OVERLAP,
    example="trunkline agents add-key builder public.pem",
)
def _add_key(call: Call) -> int:
    """Register a further key of an agent; the ones it has stay valid for a while."""
    from connectors.cli.agents.agent_key_pair import public_key_in

    public_key = public_key_in(call.file)
    return _print_key(call, _register_key(call, public_key), public_key, "")


@ACTIONS.add(
    AGENT,
    argument("key_id", "the key, as 'status' shows it", type=name_of("a key"), metavar="KEY"),
    example="trunkline agents remove-key builder 8c1f…",
)
def _remove_key(call: Call) -> int:
    """Revoke a key of an agent, at once."""
    row = call.post(_PARTICIPANTS, call.name, "keys", call.key_id, "remove")
    return call.print_answer(row, f"agent {escaped(call.name)} has {len(row['keys'])} keys")


def _register_key(call: Call, public_key: str) -> Row:
    """Register a further key and return the agent. A key that is registered already is not sent again."""
    from schemas.streams.agents.agent_signing import key_id

    found: Row = call.get(_PARTICIPANTS, call.name)
    if key_id(public_key) in {key["key_id"] for key in found["keys"]}:
        return found
    body = {"public_key": public_key, "overlap_s": round(call.overlap)}
    row: Row = call.post(_PARTICIPANTS, call.name, "keys", **body)
    return row


def _print_key(call: Call, row: Row, public_key: str, where: str) -> int:
    from schemas.streams.agents.agent_signing import key_id

    older = [f"older  {_key_text(key)}" for key in row["keys"] if key["valid_until"] is not None]
    lines = (f"agent  {escaped(row['id'])}", f"key    {key_id(public_key)}{where}", *older)
    return call.print_answer({**row, "key_id": key_id(public_key)}, *lines)


def _key_text(key: dict[str, Any]) -> str:
    until = "" if key["valid_until"] is None else f" until {key['valid_until']}"
    return f"{key['key_id']}{until}"
