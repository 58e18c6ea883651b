"""Starts and stops agents that take part with a key of their own, and shows which agents there are.

  trunkline agents spawn "sum up the mail" --name mailer    starts an agent here, and waits until it runs
  trunkline agents join builder --credentials builder.json  admits an agent that runs elsewhere, at every door
  trunkline agents join builder --new-key builder.pem       the same by MCP alone, with its key in a file
  trunkline agents active                                   the agents that take part now
  trunkline agents status mailer                            one of them, with its keys
  trunkline agents stop mailer                              ends it and revokes its keys
  trunkline agents rotate builder builder.pem               gives it a new key; the old one is valid for an hour
  trunkline agents mqtt builder --out builder.json          a mailbox over MQTT: topics, user, secret
  trunkline agents mqtt-remove builder                      revokes that secret
  trunkline agents list                                     the definitions in conf/agents/, for tasks
  trunkline agents show echo --json

The setting agent_mcp.spawn_image names the program that 'spawn' starts. A definition is a JSON file in
conf/agents/ where the gateway runs; the gateway applies a change there at once. A file with a fault defines no
agent: 'list' names it on stderr, with the fault.

Exit codes: 0; 2 wrong arguments; 3 no such agent; 4 refused, or not started; 5 the gateway does not answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from connectors.cli.agents.join_credentials import CREDENTIALS_OPTIONS, JOIN_HELP, check_no_credentials_options
from connectors.cli.shared.actions import Actions, argument, one_of
from connectors.cli.shared.arguments import AGENT, OVERLAP, ROTATION, new_private_file, request_id
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.declared import Shown, add_declared
from connectors.cli.shared.text_output import age_of, fields
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.terminal_text import escaped

_PARTICIPANTS: Final = "participants"
_CAPABILITY: Final = argument(
    "--capability", "a capability of it; may be repeated", action="append", default=[], metavar="NAME"
)
ACTIONS: Final = Actions()


def _capabilities(row: Row) -> str | None:
    return ", ".join(row["capabilities"]) or None


@ACTIONS.add(
    argument("task", "what it is to do"),
    argument("--name", "its name (default: one is made)"),
    request_id("the same agent, not a second one"),
    _CAPABILITY,
    example='trunkline agents spawn "sum up the mail" --capability mail',
)
def _spawn(call: Call) -> int:
    """Start an agent with a key of its own, and wait until it runs."""
    body = {"agent_name": call.name, "task": call.task, "capabilities": call.capability}
    row = call.post_named(_PARTICIPANTS, "spawn", possible_effect="the agent was started", **body)
    return call.print_answer(row, f"agent  {escaped(row['id'])}", f"state  {escaped(row['status'])}")


@ACTIONS.add(
    AGENT,
    one_of(
        argument("--new-key", "make a pair, the private key in FILE (0600)", type=Path, metavar="FILE"),
        argument("--key", "its key in PEM; of a private one, the public half", type=Path, metavar="FILE"),
        argument("--credentials", "write its access to every door to FILE (0600)", type=Path, metavar="FILE"),
        required=True,
    ),
    argument("--task", "what it does", metavar="TEXT"),
    request_id("the same agent"),
    _CAPABILITY,
    *CREDENTIALS_OPTIONS,
    epilog=JOIN_HELP,
)
def _join(call: Call) -> int:
    """Admit an agent that runs elsewhere, with a key of its own or with credentials for every door."""
    if call.credentials is not None:
        from connectors.cli.agents.join_credentials import join_every_door

        return join_every_door(call)
    check_no_credentials_options(call)
    from connectors.cli.agents.agent_key_pair import new_key_file, public_key_in
    from trunkline_agent.mcp.signing import key_id

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
    where = "" if new_key is None else f", in {new_key}"
    lines = (f"agent  {escaped(row['id'])}", f"key    {key_id(public_key)}{where}")
    return call.print_answer({**row, "key_file": new_key and str(new_key)}, *lines)


_COLUMNS: Final[Columns] = {
    "AGENT": "id",
    "STATE": "status",
    "SINCE": lambda row: age_of(row["started_at"]),
    "KEYS": lambda row: len(row["keys"]),
    "CAPABILITIES": _capabilities,
    "TASK": "task",
}


@ACTIONS.add(*ROTATION, example="trunkline agents rotate builder builder.pem")
def rotate(call: Call) -> int:
    """Replace the key in FILE by a new one; the old one stays valid for a while.

    The new key is made, then registered, then put in the old one's place. So the file always holds a valid key,
    wherever the command is interrupted, and the same command again goes on.
    """
    from connectors.cli.agents import agent_key_pair as key_files

    key_files.private_key(call.file)  # checked before a new one is made
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


def _register_key(call: Call, public_key: str) -> Row:
    """Register a further key and return the agent. A key that is registered already is not sent again."""
    from trunkline_agent.mcp.signing import key_id

    found: Row = call.get(_PARTICIPANTS, call.name)
    if key_id(public_key) in {key["key_id"] for key in found["keys"]}:
        return found
    body = {"public_key": public_key, "overlap_s": round(call.overlap)}
    row: Row = call.post(_PARTICIPANTS, call.name, "keys", **body)
    return row


def _print_key(call: Call, row: Row, public_key: str, where: str) -> int:
    from trunkline_agent.mcp.signing import key_id

    older = [f"older  {_key_text(key)}" for key in row["keys"] if key["valid_until"] is not None]
    lines = (f"agent  {escaped(row['id'])}", f"key    {key_id(public_key)}{where}", *older)
    return call.print_answer({**row, "key_id": key_id(public_key)}, *lines)


def _key_text(key: Row) -> str:
    until = "" if key["valid_until"] is None else f" until {key['valid_until']}"
    return f"{key['key_id']}{until}"


_MAILBOX_FIELDS: Final = ("agent_name", "inbox", "outbox", "username", "password", "secret")


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
            file.write(json.dumps({**stored, **_credentials(call, answer)}, indent=2) + "\n")
    note = "The secret is not shown again; it signs what the agent sends. --out FILE keeps it off the screen."
    if call.out is not None:
        for name in ("secret", "password"):
            answer.pop(name, None)
        # The request's id comes last.
        answer = {**answer, "credentials_file": str(call.out), "request_id": answer.pop("request_id")}
        note = f"secret    in {call.out}"
    named = [name for name in _MAILBOX_FIELDS if name in answer]
    lines = [f"{name.removesuffix('name').rstrip('_'):<9} {escaped(answer[name])}" for name in named]
    return call.print_answer(answer, *lines, note)


def _credentials(call: Call, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields by which the library of agents reads the file as its credentials."""
    mqtt = call.settings.mqtt
    access = {"host": mqtt.host, "port": mqtt.port, "tls": mqtt.tls}
    access |= {"prefix": answer["prefix"], "secret": answer["secret"]}
    ca_certs = None if mqtt.ca_certs is None else str(mqtt.ca_certs.resolve())
    return {"schema_version": 1, "name": answer["agent_name"], "mqtt": access, "ca_certs": ca_certs}


def _hardened(row: Row) -> str:
    return "yes" if row["hardened"] else "no"


_DEFINITION_COLUMNS: Final[Columns] = {
    "AGENT": "name",
    "STATE": "status",
    "IMAGE": "image",
    "HARDENED": _hardened,
    "CAPABILITIES": _capabilities,
    "DESCRIPTION": "description",
}


@ACTIONS.add(example="trunkline agents list --json | jq -r '.agents[].name'")
def _list(call: Call) -> int:
    """List the definitions by name, and on stderr the files that define none."""
    found = call.get_all("agents", key="agents", name="name")
    if not call.json:
        for file, fault in found["faults"].items():
            print(f"defines no agent: {escaped(file)}: {escaped(fault)}", file=sys.stderr)
    return call.print_rows(found, "agents", _DEFINITION_COLUMNS)


def _shown(row: Row) -> list[str]:
    return [fields({**row, "capabilities": _capabilities(row), "hardened": _hardened(row)})]


def _status(row: Row) -> list[str]:
    keys = "; ".join(_key_text(key) for key in row["keys"]) or None
    return [fields({**row, "capabilities": _capabilities(row), "keys": keys})]


def _key_removed(row: Row) -> list[str]:
    return [f"agent {escaped(row['id'])} has {len(row['keys'])} keys"]


add_declared(
    ACTIONS,
    "agents",
    Shown(
        "active",
        adapted=lambda found: {"agents": found["participants"]},
        rows="agents",
        columns=_COLUMNS,
    ),
    Shown("status", answer=_status),
    Shown("stop", answer="agent {name} is {status}"),
    Shown("remove-key", answer=_key_removed),
    Shown("mqtt-remove", answer="agent {name} over MQTT is {status}"),
    Shown("show", answer=_shown),
)
