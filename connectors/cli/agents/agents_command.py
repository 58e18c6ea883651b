"""Starts and stops agents that take part with a key of their own, and shows which agents there are.

  trunkline agents spawn "sum up the mail" --name mailer    starts an agent here, and waits until it runs
  trunkline agents join builder --new-key builder.pem       lets one take part that runs elsewhere
  trunkline agents active                                   who takes part now
  trunkline agents status mailer                            one of them, with its keys
  trunkline agents stop mailer                              it ends, its keys are worth nothing any more
  trunkline agents rotate builder builder.pem               gives it a new key; the old one is good for an hour
  trunkline agents mqtt builder --out builder.json          a mailbox over MQTT: topics, user, secret
  trunkline agents mqtt-remove builder                      that secret is worth nothing any more
  trunkline agents list                                     the definitions in conf/agents/, for tasks
  trunkline agents show echo --json

What is spawned is said by the setting agent_mcp.spawn_image. A definition is a JSON file in conf/agents/ where
the gateway runs; what changes there is taken up at once. A file with a fault defines no agent: 'list' names it
on stderr, with what is wrong with it.

Exit codes: 0; 2 wrong arguments; 3 no such agent; 4 refused, or not started; 5 the gateway does not answer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from connectors.cli.shared.hub_options import add_action, add_request_id
from connectors.cli.shared.text_table import duration_s

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_STATES = ("initializing", "idle", "working", "blocked", "stopped")
_Commands = argparse._SubParsersAction


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _configure_arrivals(commands)
    text = "list the agents that take part, by name"
    active = add_action(commands, "active", text, "trunkline agents active --capability count")
    active.add_argument("--status", choices=_STATES, help="only these (default: all but the stopped ones)")
    active.add_argument("--capability", metavar="NAME", help="only those that can do this")
    text = "show one agent that takes part or did, and its keys"
    _with_name(add_action(commands, "status", text, "trunkline agents status mailer"))
    text = "stop an agent that takes part"
    stop = _with_name(add_action(commands, "stop", text, "trunkline agents stop mailer --reason 'all is done'"))
    stop.add_argument("--reason", metavar="TEXT", help="kept with the agent")
    _configure_keys(commands)
    text = "give an agent or a principal its mailbox over MQTT"
    mqtt = _with_name(add_action(commands, "mqtt", text, "trunkline agents mqtt builder --out builder.json"))
    mqtt.add_argument(
        "--out", type=Path, metavar="FILE", help="write all of it there (new file, 0600); print no secret"
    )
    add_request_id(mqtt, "the same registration, with the same secret")
    text = "end an agent's mailbox over MQTT; what lies in it stays"
    _with_name(add_action(commands, "mqtt-remove", text, "trunkline agents mqtt-remove builder"))
    text = "list the definitions by name, and the files that define none"
    add_action(commands, "list", text, "trunkline agents list --json | jq -r '.agents[].name'")
    text = "show all that an agent's definition says"
    _with_name(add_action(commands, "show", text, "trunkline agents show echo"))


def _configure_arrivals(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "start an agent with a key of its own, and wait until it runs"
    spawn = add_action(commands, "spawn", text, 'trunkline agents spawn "sum up the mail" --capability mail')
    spawn.add_argument("task", metavar="TASK", help="what it is to do")
    spawn.add_argument("--name", metavar="NAME", help="its name (default: one is made)")
    add_request_id(spawn, "the same agent, not a second one")
    text = "let an agent take part that runs elsewhere and signs by itself ('trunkline mcp agent')"
    join = add_action(commands, "join", text, "trunkline agents join builder --new-key builder.pem")
    _with_name(join)
    key = join.add_mutually_exclusive_group(required=True)
    key.add_argument("--new-key", type=Path, metavar="FILE", help="make a pair, the private key in FILE (0600)")
    key.add_argument(
        "--key", type=Path, metavar="FILE", help="its key in PEM; of a private one, the public half"
    )
    join.add_argument("--task", metavar="TEXT", help="what it does")
    add_request_id(join, "the same agent")
    for command in (spawn, join):
        command.add_argument(
            "--capability", action="append", default=[], metavar="NAME", help="what it can do; may be repeated"
        )


def _configure_keys(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "make a new key in the place of the one in FILE; the old one is good for a while yet"
    rotate = _with_name(add_action(commands, "rotate", text, "trunkline agents rotate builder builder.pem"))
    rotate.add_argument("file", type=Path, metavar="FILE", help="the agent's private key, replaced in one step")
    text = "register a further key of an agent; the ones it has are good for a while yet"
    add_key = _with_name(add_action(commands, "add-key", text, "trunkline agents add-key builder public.pem"))
    add_key.add_argument("file", type=Path, metavar="FILE", help="in PEM; of a private key, the public half")
    for command in (rotate, add_key):
        command.add_argument(
            "--overlap",
            type=duration_s,
            default=3600.0,
            metavar="TIME",
            help="how long the older keys are good yet, as 90s, 5m, 2h (default: 1h)",
        )
    text = "take a key from an agent, at once"
    remove = _with_name(add_action(commands, "remove-key", text, "trunkline agents remove-key builder 8c1f…"))
    remove.add_argument("key_id", metavar="KEY", help="the key, as 'status' shows it")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    if args.action in ("list", "show"):
        from connectors.cli.agents.agents_definitions import ACTIONS
    elif args.action.startswith("mqtt"):
        from connectors.cli.agents.agents_mqtt import ACTIONS
    else:
        from connectors.cli.agents.agents_participants import ACTIONS
    return ACTIONS[args.action](args, settings)


def _with_name(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("name", metavar="NAME", help="the agent")
    return parser
